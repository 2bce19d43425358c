"""The command line of every command: parse words to settings, turn errors into a line and a code.

The settings are a dataclass; rackrun.help.options has the table of its options. The same mistake
gives the same message in every command: what was typed, what is wrong, and what to type for help.
"""

from __future__ import annotations

import difflib
import errno
import gc
import itertools
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_args, get_type_hints

from rackrun.contract import variables
from rackrun.contract.tasks import PLATFORM, TASKS
from rackrun.errors import MissingPackage, Problem, SaveError, UsageError, UserCodeError
from rackrun.help.options import HELP, Option, options
from rackrun.signals import handle
from rackrun.terminal import clean, clean_lines, discard, open_streams

if TYPE_CHECKING:
    from rackrun.help.page import Head

Settings = TypeVar("Settings")

Renamed = Mapping[str, str]
"""Options as other programs call them, which are accepted but never shown, and our names."""

Hints = Mapping[str, str]
"""Options of other programs, and what to type instead."""

_EMPTY: Mapping[str, str] = MappingProxyType({})

TRAINING_PACKAGES = (
    "safetensors",
    "tensorboard",
    "torch",
    "torchvision",
    "webdataset",
)
"""The packages of the extra `train`, which a light installation lacks."""

user_packages: set[str] = set()
"""The modules at the top of the import paths that the user has named, such as his own model's."""

_UNUSABLE_NAMES = (errno.ENAMETOOLONG, errno.ELOOP)
_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""What a file system answers where the mistake is not ours: any call may get it, with any path."""

_SURELY = 0.8  # for an option of another program
_ALIKE = 0.7  # of the letters, for an option that may have been meant
_MOST = 2**53  # a float holds every whole number up to it
_OPTION = re.compile(r"--?[A-Za-z].*", re.DOTALL)  # not a negative number


def parse(
    settings: type[Settings],
    prog: str,
    args: Sequence[str],
    head: Head | None = None,
    renamed: Renamed = _EMPTY,
    hints: Hints = _EMPTY,
) -> Settings:
    """Return the settings on the command line; raise UsageError for an invalid one.

    --help prints and exits; without a head, the page has that of the settings class.
    """
    current_args = list(current_names(args, renamed))
    if HELP.intersection(itertools.takewhile(lambda arg: arg != "--", current_args)):
        from rackrun.help.page import head_of, show_options

        show_options((head or head_of(settings)).of(prog=prog), settings)
    try:
        values = _values(options(settings), current_args, hints)
    except _Mistyped as error:
        message = f"{error}; type: {prog} --help".replace("?; ", "? ")
        raise UsageError(message) from None
    return built(settings, values)


class _Mistyped(Exception):
    """Arguments that are no settings: where, what is wrong with it, and what was meant."""


Values = dict[tuple[str, ...], Any]
"""Values of fields by their paths from the settings class on."""


def _values(rows: Sequence[Option], args: Sequence[str], hints: Hints) -> Values:
    """Return the values that the arguments give to options."""
    named = {row.name: row for row in rows if not row.is_positional}
    values: Values = {row.whole: () for row in rows if row.is_repeatable and row.default is MISSING}
    plain: list[str] = []
    remaining = iter(args)
    for arg in remaining:
        if arg == "--":
            plain += remaining
        elif not _OPTION.fullmatch(arg):
            plain.append(arg)
        else:
            option, value = _named(arg, named, hints)
            if value is None:
                value = next(remaining, None)
                if value is None or _OPTION.fullmatch(value):
                    raise _Mistyped(f"{option.name}: needs a value")
            _set(values, option, value)
    for option in (row for row in rows if row.is_positional):
        count = len(plain) if option.is_repeatable else 1
        for value in plain[:count]:
            _set(values, option, value)
        del plain[:count]
    if plain:
        hint = f"; did you mean --data {plain[0]}?" if "--data" in named else ""
        raise _Mistyped(f"{plain[0]}: not expected here{hint}")
    if missing := [row.name for row in rows if row.is_required and row.whole not in values]:
        raise _Mistyped(f"{' and '.join(missing)}: missing")
    return values


def _named(arg: str, named: Mapping[str, Option], hints: Hints) -> tuple[Option, str | bool | None]:
    """Return the option that an argument names, and its value; None: the next argument."""
    name, equals, value = arg.partition("=")
    name = name.replace("_", "-")
    is_off = name not in named and name.startswith("--no-")
    option = named.get(f"--{name.removeprefix('--no-')}" if is_off else name)
    if option is None or (is_off and not option.is_switch):
        shown = [row.name for row in named.values() if not row.is_hidden]
        raise _unknown(name, shown, hints)
    if not option.is_switch:
        return option, value if equals else None
    if equals:
        raise _Mistyped(f"{name}: takes no value")
    return option, not is_off


def _unknown(name: str, names: Collection[str], hints: Hints) -> Exception:
    """Return the error for an option that the command does not have."""
    if hint := hints.get(name) or hints.get(_closest(name, hints, _SURELY)):
        return UsageError(f"{name}: {hint}")
    close = _closest(name, names)
    return _Mistyped(f"{name}: no such option" + f"; did you mean {close}?" * bool(close))


def _set(values: Values, option: Option, typed: str | bool) -> None:
    value = typed if isinstance(typed, bool) else _converted(option, typed)
    path = option.whole
    values[path] = (*values.get(path, ()), value) if option.is_repeatable else value


def _converted(option: Option, typed: str) -> Any:
    """Return what was typed as a value of the option."""
    if option.choices:
        if typed not in option.choices:
            close = _closest(typed, option.choices)
            raise _Mistyped(
                f"{option.name} {typed}: not one of {', '.join(option.choices)}"
                + f"; did you mean {close}?" * bool(close)
            )
        return get_args(option.type)[option.choices.index(typed)]
    try:
        return option.type(typed)
    except ValueError:
        raise _Mistyped(f"{option.name} {typed}: {_no_number(option, typed)}") from None


def _no_number(option: Option, typed: str) -> str:
    """Return why a text is not the number that an option takes, and the number meant."""
    try:
        number = float(typed)
    except ValueError:
        return "not a number"
    is_whole = abs(number) <= _MOST and number.is_integer()
    return "not a whole number" + f"; did you mean {option.name} {number:.0f}?" * is_whole


def built(settings: type[Settings], values: Values, defaults: Settings | None = None) -> Settings:
    """Return settings with these values, and with those of the dataclasses among their fields.

    What has no value is as in `defaults`, or else as the class has it.
    """
    direct = {path[0]: value for path, value in values.items() if len(path) == 1}
    nested: dict[str, Values] = {}
    for (name, *rest), value in values.items():
        if rest:
            nested.setdefault(name, {})[tuple(rest)] = value
    types = get_type_hints(settings) if nested else {}
    dataclass: Any = settings
    given: Any = defaults
    for field in fields(dataclass) if nested else ():
        if part := nested.get(field.name):
            # A command may give the shared options that it holds defaults of its own.
            default = None if field.default_factory is MISSING else field.default_factory()
            direct[field.name] = built(types[field.name], part, default)
    made: Settings = dataclass(**direct) if defaults is None else replace(given, **direct)
    return made


def unknown_command(name: str, names: Collection[str], prog: str) -> str:
    """Return the message for an unknown command: the one that was probably meant, what to type."""
    close = difflib.get_close_matches(name, names, n=1)
    meant = f"did you mean {close[0]}?" if close else f"there are: {', '.join(names)};"
    return f"{name}: no such command; {meant} type: {prog} --help"


def typed_command(program: str) -> str:
    """Return the command that the user typed to start this program, for messages and help."""
    return os.environ.get(variables.TYPED, program)


def current_names(args: Sequence[str], renamed: Renamed) -> Iterator[str]:
    """Yield the arguments with other programs' options as ours, also in `--theirs=value`."""
    for arg in args:
        name, equals, value = arg.partition("=")
        yield renamed.get(name.replace("_", "-"), name) + equals + value


def _closest(name: str, names: Iterable[str], alike: float = _ALIKE) -> str:
    """Return the name that was probably meant; empty if none is similar."""
    return "".join(difflib.get_close_matches(name, names, n=1, cutoff=alike))


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

    trace = "".join(traceback.format_exception(error))
    location = location_in_user_code(trace)
    if not location and (refused := _refused_by_system(error)):
        return report(refused, cleaned)
    sys.stderr.write(clean_lines(trace))
    if location:
        what = traceback.format_exception_only(error)[0].splitlines()[0]
        return report(UserCodeError(f"{location}: {what}"), cleaned)
    sys.stderr.write("error: this is an internal error of rackrun, please report it\n")
    return Problem.exit_code


def _refused_by_system(error: Exception) -> Problem | None:
    """Return the line for a file that the system refuses, whose name no check can judge before."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str | bytes):
        return None
    message = f"{os.fsdecode(error.filename)}: {error.strerror}"
    if error.errno in _UNUSABLE_NAMES:
        return UsageError(message)
    return SaveError(message) if error.errno in _REFUSALS else None


def location_in_user_code(trace: str) -> str:
    """Return the innermost location of a printed traceback in the user's code, or "".

    It is neither ours nor that of libraries, but for what the user has named. The text is read, not
    the frames: those of loader workers and of compiled models only stand in the message.
    """
    locations = re.findall(
        r'^ *File "([^<"][^"]*)", line (\d+)(?:, in (\S+))?', trace, re.MULTILINE
    )
    for file, line, name in reversed(locations):
        if _is_user_code(Path(file)):
            return f"{file}:{line}{name and f' in {name}'}"
    return ""


def _is_user_code(file: Path) -> bool:
    parts, root = file.parts, Path(__file__).parents[1]
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            package = parts[parts.index(folder) + 1].removesuffix(".py")
            return package in user_packages and package not in TRAINING_PACKAGES
    if file.is_relative_to(root):
        return file.relative_to(root).parts[0] not in (*PLATFORM, *TASKS)
    return not file.is_relative_to(Path(os.__file__).parent)


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
