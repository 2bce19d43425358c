"""Run a program of ours: the boundary at which an error becomes a line and an exit code."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rackrun.contract import variables
from rackrun.contract.tasks import PLATFORM, TASKS
from rackrun.errors import MissingPackage, Problem, SaveError, UsageError, UserCodeError
from rackrun.signals import handle
from rackrun.terminal import clean, clean_lines, discard, open_streams

TRAINING_PACKAGES = (
    "safetensors",
    "tensorboard",
    "torch",
    "torchvision",
    "webdataset",
)
"""The packages of the extra `train`, which a light installation lacks."""

user_packages: set[str] = set()
"""The top-level modules of the import paths that the user has named, such as that of a model."""

_UNUSABLE_NAMES = (errno.ENAMETOOLONG, errno.ELOOP)
_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""What a file system answers where the mistake is not ours: any call may get it, with any path."""


def typed_command(program: str) -> str:
    """Return the command that the user typed to start this program, for messages and help."""
    return os.environ.get(variables.TYPED, program)


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP, raised as Python raises Ctrl-C, so that every clean-up on the way runs."""


def run(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a program of ours with the arguments that were typed, and exit with its code."""
    sys.exit(outcome(main, sys.argv[1:]))


def outcome(
    main: Callable[[list[str]], int | None],
    args: Sequence[str],
    cleaned: Callable[[str], str] = clean,
) -> int:
    """Run a command; return its exit code, after a line for whatever went wrong, `cleaned`.

    This is the only place that turns an error into a line and a code. SIGTERM and SIGHUP end a
    command as Ctrl-C does.
    """
    open_streams()
    handle((signal.SIGTERM, signal.SIGHUP), _stop)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # while this was imported
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            code = print_version() if args == ["--version"] else main(list(args)) or 0
        except SystemExit:  # --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return code
    except Stopped as stop:
        _ignore_signals()
        sys.stderr.write(f"stopped by {stop.args[0].name}\n")
        return 128 + int(stop.args[0])
    except KeyboardInterrupt as interrupt:
        _ignore_signals()
        said = str(interrupt)  # what a command adds, such as how to continue
        sys.stderr.write(clean(f"interrupted{': ' if said else ''}{said}") + "\n")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return reader_left()
    except Exception as error:
        return report(error, cleaned)


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
    if isinstance(error, FileNotFoundError) and not error.filename and _is_folder_gone():
        error = UsageError("the folder that this was typed in is gone; type: cd to another one")
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


def _is_folder_gone() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - what Path.cwd() calls
    except FileNotFoundError:
        return True
    return False


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
    parts, root = file.parts, Path(__file__).parents[2]
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            package = parts[parts.index(folder) + 1].removesuffix(".py")
            return package in user_packages and package not in TRAINING_PACKAGES
    if file.is_relative_to(root):
        return file.relative_to(root).parts[0] not in ("rackrun", *PLATFORM, *TASKS)
    return not file.is_relative_to(Path(os.__file__).parent)


def missing_package(error: ModuleNotFoundError) -> MissingPackage | None:
    """Return the message for a missing package that only training needs; None for any other."""
    package = (error.name or "").partition(".")[0]
    return MissingPackage(package) if package in TRAINING_PACKAGES else None


def reader_left() -> int:
    """Return the exit code for a reader (head, less) that has closed the output."""
    discard(sys.stdout)
    return 128 + signal.SIGPIPE


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(signal.Signals(number))


def _ignore_signals() -> None:
    # The end is decided; another signal would only cut the last message short.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
