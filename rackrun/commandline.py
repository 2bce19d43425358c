"""The one way from a command line to settings, and from an error to a line and an exit code."""

import contextlib
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn, TypeVar

import tyro

from rackrun.errors import Problem, UsageError
from rackrun.terminal import clean

Settings = TypeVar("Settings")

BAD_USAGE = 2  # tyro's exit code

MARKERS = (
    tyro.conf.DisallowNone,
    tyro.conf.OmitArgPrefixes,
    tyro.conf.OmitSubcommandPrefixes,
    tyro.conf.PositionalMetavarFromFieldName,
)


def parse(settings: type[Settings], prog: str, args: Sequence[str]) -> Settings:
    """Settings as the command line says, defaults from the dataclass; bad usage: UsageError."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(settings, prog=prog, args=list(args), config=MARKERS)
    except SystemExit as exit:
        if exit.code != BAD_USAGE:  # --help, or a signal that came meanwhile
            raise
        raise UsageError(one_line(complaint.getvalue())) from None


def one_line(complaint: str) -> str:
    """The boxed complaint of tyro as a sentence: what is wrong, what was meant, where to look."""
    rows = [row.strip("│╭╮╰╯ ") for row in complaint.splitlines()]
    sections = [" ".join(part.split()) for part in re.split("─+", " ".join(rows[1:]))]
    what = re.sub(
        r"no type matching (INT|FLOAT) could be instantiated from \[('.*')\]\. Got errors.*"
        r"|invalid literal for int\(\) with base 10: ('.*')"
        r"|could not convert string to float: ('.*')",
        lambda match: f"{match[2] or match[3] or match[4]} is not a number",
        sections[0],
    )
    parts = [what.rstrip(".")]
    meant = re.search(r"Perhaps you meant.*?(--[\w-]+)", complaint, re.DOTALL)
    if meant:
        parts.append(f"did you mean {meant[1]}?")
    parts += [section for section in sections[1:] if section.startswith("Available")]
    parts += [section for section in sections[1:] if section.startswith("For full helptext")]
    return (
        "; ".join(parts)
        .replace("For full helptext, ", "")
        .replace("run: ", "run ")
        .replace("see python", "run python")
    )


def run(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a command to its exit: the only place that turns an error into a line and a code."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(_outcome(main))


def _outcome(main: Callable[[list[str]], int | None]) -> int:
    try:
        code = main(sys.argv[1:]) or 0
        sys.stdout.flush()
        return code
    except Problem as problem:
        sys.stderr.write(f"error: {clean(str(problem))}\n")
        return problem.exit_code
    except KeyboardInterrupt as interrupt:
        sys.stderr.write(clean(f"interrupted{': ' if str(interrupt) else ''}{interrupt}") + "\n")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader (head, less) has left; give the interpreter's last flush somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception:
        traceback.print_exc()
        sys.stderr.write("error: this is an internal error of rackrun, please report it\n")
        return Problem.exit_code


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
