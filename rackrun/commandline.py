"""The command line of every command: parse words to settings, turn errors into a line and a code.

The settings are a dataclass, the parser is tyro's. The same mistake gives the same message in every
command: what was typed, what is wrong with it, and what to type for help.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import io
import itertools
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import Any, NoReturn, TypeVar

from rackrun.contract import variables
from rackrun.errors import MissingPackage, Problem, UsageError
from rackrun.signals import handle
from rackrun.terminal import clean, clean_lines, discard, open_streams

Settings = TypeVar("Settings")

Renamed = Mapping[str, str]
"""Old spellings of options, which are accepted but never shown, and the current ones."""

Answers = Mapping[str, str]
"""Options of other programs, and what to type instead."""

_NO_WORDS: Mapping[str, str] = MappingProxyType({})

TRAINING_PACKAGES = (
    "matplotlib",
    "safetensors",
    "tensorboard",
    "torch",
    "torchvision",
    "webdataset",
)
"""The packages of the extra `train`, which a light installation lacks."""

_BAD_USAGE = 2  # tyro's exit code

_UNSURE = ("Unrecognized options", "Missing argument", "Required options")
"""Errors that tyro reports for an unknown option: before a positional argument, it reports only
that the argument is missing."""

_SURELY = 0.8  # for an option of another program
_ALIKE = 0.7  # of the letters, for an option that may have been meant
_OPTION = re.compile(r"--?[A-Za-z].*")  # not a negative number

_QUOTED = r"(['\"])(?P<value>.*?)\2"
_SENTENCES = (  # what tyro writes -> where: what
    (
        r"Error parsing (\S+): (?:invalid literal for int\(\) with base 10: "
        r"|could not convert string to float: |no type matching (?:INT|FLOAT)[^[]*\[)" + _QUOTED,
        r"\1 \g<value>: not a number",
    ),
    (r"Error parsing (\S+): Could not find valid parse for arguments: (\[.*\])", r"\1 \2: invalid"),
    (r"Error parsing (\S+): (.*)", r"\1: \2"),
    (
        r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*?),?\)\.",
        r"\2 \1: not one of \3",
    ),
    (r"Missing value for argument '(.*)'\. .*", r"\1: needs a value"),
    (r"Unrecognized options: (.*)", r"\1: not expected here"),
)


def parse(
    settings: type[Settings],
    prog: str,
    args: Sequence[str],
    description: str | None = None,
    markers: Sequence[Any] = (),
    renamed: Renamed = _NO_WORDS,
    answers: Answers = _NO_WORDS,
) -> Settings:
    """Return the settings on the command line; raise UsageError for an invalid one.

    `markers` are additional ones of `tyro.conf`. --help prints and exits.
    """
    import tyro  # a twentieth of a second, which commands that need no options do without

    markers = (
        tyro.conf.DisallowNone,
        tyro.conf.HelptextFromCommentsOff,  # help is below a field; to look for more takes 30 ms
        tyro.conf.OmitArgPrefixes,
        tyro.conf.OmitSubcommandPrefixes,
        tyro.conf.PositionalMetavarFromFieldName,
        *markers,
    )

    def read(words: Sequence[str]) -> Settings:
        return tyro.cli(
            settings, prog=prog, args=list(words), description=description, config=markers
        )

    words = list(current_names(args, renamed))
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return read(words)
    except SystemExit as exit:
        if exit.code != _BAD_USAGE:  # --help, or a signal that came meanwhile
            raise
    raise UsageError(_sentence(_complaint(read, words), words, _options(read, words), answers))


def unknown_command(word: str, known: Collection[str], prog: str) -> str:
    """Return the message for an unknown command: the one that was probably meant, what to type."""
    close = difflib.get_close_matches(word, known, n=1)
    meant = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)};"
    return f"{word}: no such command; {meant} type: {prog} --help"


def typed_command(program: str) -> str:
    """Return the command that the user typed to start this program, for messages and help."""
    return os.environ.get(variables.TYPED, program)


def current_names(args: Sequence[str], renamed: Renamed) -> Iterator[str]:
    """Yield the words with old spellings of options replaced, also in `--old=value`."""
    for word in args:
        name, equals, value = word.partition("=")
        yield renamed.get(name.replace("_", "-"), name) + equals + value


def _complaint(read: Callable[[Sequence[str]], object], words: Sequence[str]) -> str:
    """Return tyro's boxed error; it draws boxes only if standard output is UTF-8."""
    complaint = io.StringIO()
    utf8 = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with (
        contextlib.redirect_stdout(utf8),
        contextlib.redirect_stderr(complaint),
        contextlib.suppress(SystemExit),
    ):
        read(words)
    return complaint.getvalue()


def _options(read: Callable[[Sequence[str]], object], words: Sequence[str]) -> set[str]:
    """Return the options that the help of this command shows."""
    leading = itertools.takewhile(lambda word: not word.startswith("-"), words)
    shown = io.StringIO()
    with (
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(io.StringIO()),  # of a leading word that is wrong
        contextlib.suppress(SystemExit),
    ):
        read([*leading, "--help"])
    return set(re.findall(r"--?[\w-]+", shown.getvalue()))


def _sentence(complaint: str, words: Sequence[str], known: set[str], answers: Answers) -> str:
    """Return tyro's boxed error as a sentence: where, what, and what to type."""
    title, *rows = [row.strip("│╭╮╰╯") for row in complaint.splitlines()]
    sections = [" ".join(part.split()) for part in re.split("─{2,}", "\n".join(rows))]
    parts = [_missing(title, rows) or _what(sections[0], words)]
    if any(kind in title for kind in _UNSURE) and (unknown := _unknown(words, known)):
        if answer := answers.get(unknown) or answers.get(_closest(unknown, answers, _SURELY)):
            return f"{unknown}: {answer}"
        close = _closest(unknown, known)
        parts = [f"{unknown}: no such option" + f"; did you mean {close}?" * bool(close)]
    for section in sections[1:]:
        if section.startswith("Available subcommands: "):
            names = section.partition(": ")[2]
            close = _closest(words[0], names.split(", "))
            parts.append(f"did you mean {close}?" if close else f"there are: {names}")
    if help_of := re.search(r"For full helptext, (?:see|run:?) (.* --help)", " ".join(sections)):
        parts.append(f"type: {help_of[1]}")
    return "; ".join(parts).replace("?; ", "? ")


def _unknown(words: Sequence[str], known: set[str]) -> str:
    """Return the first option that the command does not have, if any."""
    for word in itertools.takewhile(lambda word: word != "--", words):
        name = word.partition("=")[0].replace("_", "-")
        if _OPTION.fullmatch(name) and name not in known:
            return name
    return ""


def _closest(name: str, names: Iterable[str], alike: float = _ALIKE) -> str:
    """Return the name that was probably meant; empty if none is similar."""
    return "".join(difflib.get_close_matches(name, names, n=1, cutoff=alike))


def _missing(title: str, rows: Sequence[str]) -> str:
    """Return the message about required arguments that were left out, if any."""
    if "Required options" not in title:
        return ""
    names = [match[1] for row in rows if (match := re.match(r" {5}(\S.*?) *$", row))]
    return f"{' and '.join(name for name in names if '--help' not in name)}: missing"


def _what(section: str, words: Sequence[str]) -> str:
    """Return a section of tyro's error in the wording of all commands."""
    complaint, expected, choices = section.partition(". Expected one of ")
    section = complaint + expected + choices.replace("'", "")
    for pattern, sentence in _SENTENCES:
        if match := re.match(pattern, section):
            return _as_typed(match.expand(sentence), words)
    return section.rstrip(".")


def _as_typed(sentence: str, words: Sequence[str]) -> str:
    """Return a sentence about `--new/--old` with the one of these names that was typed."""
    names = re.match(r"\S+?(?=[ :])", sentence)
    if names is None or not sentence.startswith("-"):
        return sentence
    typed = {word.partition("=")[0] for word in words}
    name = next((name for name in names[0].split("/") if name in typed), names[0])
    return name + sentence[names.end() :]


def run(
    main: Callable[[list[str]], int | None], signals: Sequence[signal.Signals] = (signal.SIGTERM,)
) -> NoReturn:
    """Run a command and exit: the only place that turns an error into a line and a code.

    These signals end it after all cleanup.
    """
    open_streams()
    handle(signals, _terminate)
    code = _outcome(main)
    exec("")  # noqa: S102  else `python -m` ends by SIGINT, see rackrun/__main__.py
    gc.freeze()  # the exit would look for garbage in all of torch: a second, for nothing
    sys.exit(code)


def leave(code: int) -> NoReturn:
    """End this process and its children at once, for programs that have imported torch.

    In the interpreter's shutdown, libraries of torch print what they leaked, and can abort.
    """
    import multiprocessing.util

    for child in multiprocessing.active_children():
        child.kill()  # loader workers ignore every weaker signal
    # No semaphore or folder of sockets stays, and the server of loader workers ends.
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(code)


def _outcome(main: Callable[[list[str]], int | None]) -> int:
    try:
        try:
            code = print_version() if sys.argv[1:] == ["--version"] else main(sys.argv[1:]) or 0
        except SystemExit:  # --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as interrupt:
        sys.stderr.write(clean(f"interrupted{': ' if str(interrupt) else ''}{interrupt}") + "\n")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return reader_left()
    except Exception as error:
        return report(error)


def print_version() -> int:
    """Print the line of --version, and return the exit code."""
    from rackrun import __version__

    sys.stdout.write(f"rackrun {__version__}\n")
    return 0


def report(error: Exception, cleaned: Callable[[str], str] = clean) -> int:
    """Print an error without control characters; return the exit code.

    `cleaned` is for messages: a newline in a file name must not begin a line.
    """
    if isinstance(error, ModuleNotFoundError) and (needed := missing_package(error)):
        error = needed
    if isinstance(error, Problem):
        sys.stderr.write(f"error: {cleaned(str(error))}\n")
        return error.exit_code
    import traceback

    sys.stderr.write(clean_lines("".join(traceback.format_exception(error))))
    sys.stderr.write("error: this is an internal error of rackrun, please report it\n")
    return Problem.exit_code


def missing_package(error: ModuleNotFoundError) -> MissingPackage | None:
    """Return the message for a missing package that only training needs; None for any other."""
    package = (error.name or "").partition(".")[0]
    return MissingPackage(package) if package in TRAINING_PACKAGES else None


def reader_left() -> int:
    """Return the exit code for a reader (head, less) that has closed the output."""
    discard(sys.stdout)
    return 128 + signal.SIGPIPE


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
