"""What is to run: a task with its options, or a command of the user's own."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import dropwhile
from pathlib import Path, PurePath
from typing import NoReturn

from rackrun.commands import COMMANDS, LAUNCHES, called
from rackrun.contract.files import LATEST
from rackrun.data_location import PIPE, parts_of, with_joined_data
from rackrun.errors import UsageError
from rackrun.launcher.run.job import TaskWork, Work, command_of, values_in
from rackrun.launcher.run.nested import ASSIGNMENT, PYTHON, SHELLS, nested_launcher
from rackrun.launcher.run.url import check_url
from rackrun.user_code.tasks import find_task, why_no_task

BUILTINS = (".", "alias", "cd", "eval", "exec", "export", "module", "set", "source", "ulimit")
"""What a shell does itself, so that there is no program of that name."""
SHELL_SIGNS = re.compile(r"[;&|<>$*`(]")
FLAGS = re.compile("-[bBdeEiIlOuvx]+")
"""Options of Python and of shells that have no value."""


def work_of(rest: Sequence[str], typed_before: Sequence[str] = ()) -> Work | None:
    """Return the task with its options, the command after `--`, or None.

    `typed_before` are the words before these, for the command line in a UsageError.
    """
    if not rest:
        return None
    if rest[0] == "--":
        if not rest[1:]:
            raise UsageError("-- needs a command; for example: -- python train.py")
        if why := nested_launcher(rest[1:]) or _why_no_program(rest[1:]):
            raise UsageError(why)
        return command_of(rest[1:])
    if not find_task(rest[0]):
        raise UsageError(_no_task(rest, typed_before))
    name = rest[0]
    if Path(name).is_absolute() and Path(name).is_relative_to(Path.cwd()):
        name = str(Path(name).relative_to(Path.cwd()))  # which is the same on every host
    task = TaskWork(name, tuple(map(_with_latest_run_named, with_joined_data(rest[1:]))))
    for data in (*values_in(task.options, "--data"), *values_in(task.options, "--eval-data")):
        for part in parts_of(data):
            if "://" in part and not part.startswith(PIPE):
                check_url(part)
    return task


def _why_no_program(args: Sequence[str]) -> str:
    """Return why these words start no program, or one that does nothing, and what to type."""
    first, *others = args
    if ASSIGNMENT.fullmatch(first):
        command = shlex.join(others) or "COMMAND"
        return f"{first}: a variable, not a program; type: --env {shlex.quote(first)} -- {command}"
    if first in BUILTINS:
        text = shlex.quote(f"{shlex.join(args)} && python train.py")
        return f"{first}: only a shell does that; type: -- bash -c {text}"
    if not others and " " in first and not Path(first).exists():
        words = f"bash -c {shlex.quote(first)}" if SHELL_SIGNS.search(first) else first
        return f"{first!r}: a whole command as one word; type: -- {words}"
    if first.endswith(".py") and Path(first).is_file() and not shutil.which(first):
        return f"{first}: not a program by itself; type: -- python {shlex.join(args)}"
    if _reads_program(PurePath(first).name, others):
        return (
            f"{shlex.join(args)}: ranks have no standard input to read a program from; name a file"
        )
    return ""


def _reads_program(name: str, args: Sequence[str]) -> bool:
    rest = list(dropwhile(FLAGS.fullmatch, args))
    is_interpreter = name in SHELLS or PYTHON.fullmatch(name)
    return bool(is_interpreter) and (not rest or rest[0] in ("-", "-s", "/dev/stdin"))


def _no_task(args: Sequence[str], typed_before: Sequence[str]) -> str:
    name = args[0]
    if name.endswith((".txt", ".hosts")) or Path(name).name == "hostfile":
        meant = f"{called('ssh')} {shlex.join(args)}"
        return f"{name!r} is not a task; to use the hosts of a file, type: {meant}"
    if close := get_close_matches(name, COMMANDS, n=1, cutoff=0.75):
        meant = f"{called(close[0])} {shlex.join(args[1:])}".rstrip()
        return f"no task or command {name!r}; did you mean {close[0]}? type: {meant}"
    why = why_no_task(name)
    script = ["python"] if name.endswith(".py") else []
    if "did you mean" in why or (script and not Path(name).is_file()):
        return why
    is_program = script or name.endswith(".sh") or _is_program(name)
    program = [*script, *args] if is_program else ["python", "train.py"]
    return f"{why}; for a command of your own: {shlex.join([*typed_before, '--', *program])}"


def _is_program(name: str) -> bool:
    # Ranks have a `python` also where this machine has a python3 alone.
    return name == "python" or shutil.which(name) is not None


def _with_latest_run_named(option: str) -> str:
    # Below `runs/latest` means in the run that it links to now: this launch will move the link.
    name, _, value = option.rpartition("=")
    path = Path(value)
    for link in (path, *path.parents):
        if link.name == LATEST and link.is_symlink():
            run = link.with_name(link.readlink().name)
            return f"{name}{name and '='}{run / path.relative_to(link)}"
    return option


def refuse_no_host_file(options: Sequence[str], rest: Sequence[str]) -> None:
    """Raise UsageError for a task or a program in place of the host file."""
    first = rest[0]
    is_task = (first.endswith(".py") or not Path(first).is_file()) and bool(find_task(first))
    is_script = first.endswith((".py", ".sh"))
    if not is_task and not is_script and (Path(first).exists() or not _is_program(first)):
        return
    program = ["--", *(["python"] if first.endswith(".py") else [])]
    meant = shlex.join([*options, "hosts.txt", *([] if is_task else program), *rest])
    raise UsageError(
        f"{first} is a {'task' if is_task else 'program'}; the host file comes first:"
        f" {called('ssh')} {meant}"
    )


def refuse_command(rest: Sequence[str], options: Sequence[str], hosts: Sequence[str]) -> NoReturn:
    """Raise UsageError for a command after a launch's options and host file."""
    command, *args = rest
    others = [option for option in options if option != "--plain"]  # which print lines anyway
    words_kept: Sequence[str] = ()
    if command in LAUNCHES:
        words_kept = [*options, *hosts]
    elif command == "rack":
        words_kept = [*others, *hosts]
    elif command in ("ps", "attach", "logs", "status", "stop"):
        words_kept = others
    typed_first = f"{called(command)} {shlex.join([*words_kept, *args])}".rstrip()
    raise UsageError(f"{command} is a command, and comes first: {typed_first}")
