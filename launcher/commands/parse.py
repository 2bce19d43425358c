"""The launcher's command line: options from dataclasses, then a task or command."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from launcher.commands.settings import SshOptions
from launcher.config.command_line import (
    HOSTS,
    NO_FILE,
    file_in,
    launcher_words,
    settings_text,
    typed_options,
    with_place,
    without_file,
    work_words,
)
from launcher.config.settings_file import SettingsFile, read_settings
from launcher.run.job import (
    JobTemplate,
    TaskWork,
    Work,
    all_data_of,
    command_of,
    resume_of,
    without_option,
)
from launcher.run.settings import Options
from launcher.run.url import check_url
from rackrun.commandline import parser
from rackrun.commandline.help_page import Head
from rackrun.commandline.options import HELP, Option, options
from rackrun.commands import LAUNCHES, NAMES, called, is_command
from rackrun.contract import variables
from rackrun.contract.files import LATEST
from rackrun.errors import UsageError
from rackrun.user_code.tasks import OWN_TASK, find_task, known_tasks, why_no_task

TYPED_ONLY = {
    "scaling": "launch once for every count instead",
    "sweep": "launch once for every combination instead",
    "sweep_hosts": "launch once for every combination instead",
    "detach": f"from Python a run stays attached; type: {called('ssh')} --detach",
    "check": f"type: {called('check')}",
    "deep": f"type: {called('check')} --deep",
    "dry_run": f"type: {called('local')} --dry-run, or {called('ssh')} --dry-run",
    "json": "a Result is returned",
    "config": "give its options by name",
}
"""Options without effect when a run is started from Python, and what to do instead."""

RENAMED = {
    "--nproc-per-node": "--nproc",
    "--num-processes": "--nproc",
    "--num-gpus": "--nproc",
    "--np": "--nproc",
    "-np": "--nproc",
    "--master-port": "--port",
    "-H": "--host-list",
}
"""Options as other launchers call them."""

FIRST_WORD = "the host file is named without an option: {ssh} hosts.txt catdog"
BY_LINES = "the host file says which hosts take part, one per line; a part of them: --include"
NOT_NEEDED = "not needed: ranks meet at the first host of the host file"
SLOTS = "write slots=2 after the host's name in the host file"
CHOSEN = "for some GPUs of hosts: --include gpu01:0,1; of this machine: CUDA_VISIBLE_DEVICES=0,1"

ELSEWHERE = {
    **dict.fromkeys(("--hostfile", "--hosts-file", "--machinefile"), FIRST_WORD),
    **dict.fromkeys(("--nnodes", "--num-nodes", "--num-machines", "--num-hosts"), BY_LINES),
    **dict.fromkeys(("--node-rank", "--machine-rank"), BY_LINES),
    **dict.fromkeys(("--master-addr", "--rdzv-endpoint", "--rdzv-backend"), NOT_NEEDED),
    **dict.fromkeys(("--rdzv-id", "--standalone"), NOT_NEEDED),
    **dict.fromkeys(("--gpus", "--gpu-ids", "--devices"), CHOSEN),
}
"""Options of torchrun, accelerate, DeepSpeed and mpirun, and what to type instead."""

OF_TASKS = (
    *("--batch-size", "--data", "--device", "--epochs", "--image-size", "--lr", "--model"),
    *("--optimizer", "--precision", "--recipe", "--resume", "--synthetic", "--weights"),
)
"""Options of every task that are typed before one, or without one."""

Settings = TypeVar("Settings")

AnyOptions = TypeVar("AnyOptions", bound=Options)
"""The options of one way to launch."""


def split(
    args: Sequence[str], settings: type[Options], plain_words: int = 0
) -> tuple[list[str], list[str]]:
    """Return the launcher's options and `plain_words` first words; and the rest, task first."""
    launcher_args: list[str] = []
    rest = list(args)
    while rest and rest[0] != "--":
        arg = rest[0]
        if not arg.startswith("-"):
            if not plain_words:
                break
            plain_words -= 1
        launcher_args.append(rest.pop(0))
        name = RENAMED.get(arg, arg)
        if name.startswith("-") and "=" not in name and rest and name not in flags(settings):
            launcher_args.append(rest.pop(0))
    return launcher_args, rest


def takes_settings_file(
    settings: type[Options], plain_words: int = 0
) -> Callable[[Callable[[Sequence[str]], int]], Callable[[Sequence[str]], int]]:
    """Let a launch take --config FILE, whose settings come before the typed words.

    An error about an option of the file names file and key. `plain_words` come before the task, as
    in `split`.
    """

    def decorate(main: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
        def main_with_file(args: Sequence[str]) -> int:
            name = file_in(split(args, settings, plain_words)[0])
            if not name:
                return main(args)
            file = read_settings(Path(name))
            try:
                return main(with_settings(file, args, settings, plain_words))
            except UsageError as error:
                raise with_place(error, file, args) from None

        return main_with_file

    return decorate


def with_settings(
    file: SettingsFile, args: Sequence[str], settings: type[Options], plain_words: int = 0
) -> list[str]:
    """Return a command line with the settings of a file; typed options take precedence."""
    launcher_args, rest = split(args, settings, plain_words)
    before, work = split(args, settings)
    hosts: list[str] = []
    if (
        plain_words
        and HOSTS in file.launcher
        and (not work or work[0] == "--" or find_task(work[0]))
    ):
        launcher_args, rest = before, work  # no host file was typed
        names = {arg.partition("=")[0] for arg in parser.current_names(launcher_args, RENAMED)}
        hosts = [] if names & NO_FILE else [str(file.launcher[HOSTS])]
    typed_names = typed_options(list(parser.current_names(launcher_args, RENAMED)))
    file_args = launcher_words(file, settings, typed_names)
    return [*file_args, *without_file(launcher_args), *hosts, *work_words(file, rest)]


def job_template(
    way: str, options: Options, work: Work, again: tuple[str, ...] = ()
) -> JobTemplate:
    """Return the template of a launch's jobs, with the command `again` and its settings file."""
    resume = ("--resume", resume_of(work)) if again and resume_of(work) else ()
    text = settings_text(way, options, work, (*again, *resume))
    return replace(options.jobs, typed=again, settings=text)


def flags(settings: type[Options]) -> set[str]:
    """Return the options that take no value."""
    switches = [option for option in options(settings) if option.is_switch]
    return {*HELP, *(f"--{no}{option.key}" for option in switches for no in ("", "no-"))}


def names_of(settings: type[Any]) -> set[str]:
    """Return all options but those that are typed without their names."""
    return {option.name for option in options(settings) if not option.is_positional}


def parse(
    settings: type[Settings], name: str, args: Sequence[str], head: Head | None = None
) -> Settings:
    """Return the options of a command as a dataclass; raise UsageError for bad usage. --help exits.

    `{prog}` in the head of the help becomes the command as the user calls it.
    """
    hints = {**_hints_of(settings), **_behind_tasks(settings, name)}
    return parser.parse(settings, called(name), args, head and launching(head), RENAMED, hints)


def _behind_tasks(settings: type[Any], name: str) -> dict[str, str]:
    """Return hints for options of tasks among those of the launcher."""
    if not issubclass(settings, Options):
        return {}
    typed_first = f"{called(name)} {'hosts.txt ' if settings is SshOptions else ''}catdog"
    return {
        option: f"an option of tasks, and goes behind one, as in: {typed_first} {option}"
        for option in OF_TASKS
    }


def launching(head: Head) -> Head:
    """Return the head of a way to launch, with the tasks that can be launched below the options."""
    tasks = f"Tasks: {', '.join(known_tasks())}, or your own: {OWN_TASK}."
    return replace(head, foot=f"{tasks}\n\n{head.foot}")


def _hints_of(settings: type[Any]) -> dict[str, str]:
    """Return hints for options that other commands have, but not this one."""
    if not issubclass(settings, Options):
        return {}
    names = names_of(settings)
    of_hosts = {name: f"only for hosts: {{ssh}} {name}" for name in names_of(SshOptions)}
    hints = {**of_hosts, "--nproc": SLOTS, "--hosts": FIRST_WORD, **ELSEWHERE}
    return {
        name: hint.replace("{ssh}", called("ssh"))
        for name, hint in hints.items()
        if name not in names
    }


def from_names(settings: type[AnyOptions], values: Mapping[str, Any]) -> AnyOptions:
    """Return the options given by name in Python; raise UsageError for an unknown one."""
    names = {_as_field(typed): _as_field(name) for typed, name in RENAMED.items()}
    given = {names.get(name, name): value for name, value in values.items()}
    for name, instead in TYPED_ONLY.items():
        if given.get(name):
            raise UsageError(f"{name} is for the command line: {instead}")
    rows = {row.field: row for row in options(settings)}
    if unknown := given.keys() - rows:
        raise UsageError(f"launch has no option {min(unknown)!r}")
    return parser.built(
        settings, {rows[name].whole: _meant(rows[name], value) for name, value in given.items()}
    )


def _as_field(option: str) -> str:
    """Return the name of an option as Python has it: `--nproc-per-node` -> `nproc_per_node`."""
    return option.removeprefix("--").replace("-", "_")


def _meant(option: Option, value: Any) -> Any:
    """Return a value from Python as an option has it; raise UsageError if it does not fit."""
    if option.is_repeatable and isinstance(value, list | tuple):
        return tuple(value)
    if not option.is_repeatable:
        if option.type in (Path, str) and isinstance(value, str | os.PathLike):
            return option.type(os.fspath(value))
        if option.type is float and isinstance(value, int):
            return float(value)
        if isinstance(value, option.type):
            return value
    kind = "a list" if option.is_repeatable else f"of type {option.type.__name__}"
    raise UsageError(f"{option.field}={value!r}: must be {kind}")


def read_work(
    name: str, settings: type[Options], launcher_args: Sequence[str], rest: Sequence[str]
) -> Work | None:
    """Return the task or command to run; raise UsageError with what was probably meant.

    The launcher's options may not appear among a task's. A task that is called for something other
    than training replaces this process.
    """
    prog = called(name)
    if is_command(rest[:1]):
        command, *words = rest
        before, after = split(launcher_args, settings)  # the host file, and options behind it
        words = [*_taken_by(command, [*before, *after[1:]], after[:1]), *words]
        typed_first = f"{called(command)} {shlex.join(words)}".rstrip()
        raise UsageError(f"{command} is a command, and comes first: {typed_first}")
    work = work_of(rest, (*prog.split(), *launcher_args))
    if isinstance(work, TaskWork):
        if _is_question(work):
            _become_task(work, shlex.join([*prog.split(), *launcher_args]))
        _refuse_misplaced(prog, launcher_args, settings, work)
    return work


_OF_RUNS = ("attach", "board", "logs", "status", "stop")
"""The commands that take the hosts of a run as --hosts FILE."""


def _taken_by(command: str, options: Sequence[str], file: Sequence[str]) -> list[str]:
    """Return what a command takes of a launch's options and its host file."""
    if command in LAUNCHES:
        return [*options, *file]
    options = [option for option in options if option != "--plain"]
    if command in ("rack", "ps"):
        return [*options, *file]
    hosts = ["--hosts", *file] if file else []
    return [*options, *hosts] if command in _OF_RUNS else []


def _become_task(work: Work, typed: str) -> NoReturn:
    """Let a task answer in place of this process: its --help, or a tool such as predict."""
    sys.stdout.flush()
    os.execve(sys.executable, work.argv(sys.executable), {**os.environ, variables.TYPED: typed})


def _refuse_misplaced(
    prog: str, launcher_args: Sequence[str], settings: type[Options], task: TaskWork
) -> None:
    """Refuse launcher options after a task; the message has the intended command."""
    names, hints = names_of(settings), _hints_of(settings)
    ours: list[str] = []
    kept: list[str] = []
    remaining = iter(task.options)
    for arg in remaining:
        name = next(parser.current_names([arg.partition("=")[0]], RENAMED))
        if name in hints:
            raise UsageError(f"{name}: {hints[name]}")
        if name not in names:
            kept.append(arg)
            continue
        has_value = "=" not in arg and name not in flags(settings)
        ours += [arg, *([next(remaining, "")] if has_value else [])]
    if ours:
        meant = shlex.join([*ours, *launcher_args, task.task, *kept])
        raise UsageError(f"{ours[0].partition('=')[0]} goes before {task.task}: {prog} {meant}")


def work_of(rest: Sequence[str], before: Sequence[str] = ()) -> Work | None:
    """Return the task with its options, the command after `--`, or None.

    `before` are the arguments before, for a better command line in a UsageError.
    """
    if not rest:
        return None
    if rest[0] == "--":
        if not rest[1:]:
            raise UsageError("-- needs a command; for example: -- python train.py")
        return command_of(rest[1:])
    if not find_task(rest[0]):
        raise UsageError(_no_task(rest, before))
    task = TaskWork(_portable_path(rest[0]), tuple(map(_with_latest_run_named, rest[1:])))
    for data in all_data_of(task):
        if "://" in data:
            check_url(data)
    return task


def _no_task(args: Sequence[str], before: Sequence[str]) -> str:
    """Return why these arguments are not a task with options, and what was probably meant."""
    name = args[0]
    if name.endswith((".txt", ".hosts")) or Path(name).name == "hostfile":
        return f"{name!r} is no task; for the hosts of a file: {called('ssh')} {shlex.join(args)}"
    if close := get_close_matches(name, NAMES, n=1, cutoff=0.75):
        meant = f"{called(close[0])} {shlex.join(args[1:])}".rstrip()
        return f"no task or command {name!r}; did you mean {close[0]}? type: {meant}"
    why = why_no_task(name)
    script = ["python"] if name.endswith(".py") else []
    if "did you mean" in why or (script and not Path(name).is_file()):
        return why
    program = [*script, *args] if script or _is_program(name) else ["python", "train.py"]
    return f"{why}; for a command of your own: {shlex.join([*before, '--', *program])}"


def _with_latest_run_named(option: str) -> str:
    """Return the run that `runs/latest` links to now: this launch will move the link."""
    name, _, value = option.rpartition("=")
    path = Path(value)
    if path.name != LATEST or not path.is_symlink():
        return option
    return f"{name}{name and '='}{path.with_name(path.readlink().name)}"


def _portable_path(task: str) -> str:
    """Return a file of this folder by its relative path, which is the same on every host."""
    below = Path(task).is_absolute() and Path(task).is_relative_to(Path.cwd())
    return str(Path(task).relative_to(Path.cwd())) if below else task


def _is_program(name: str) -> bool:
    return name.endswith(".sh") or shutil.which(name) is not None


def typed(command: str, launcher_args: Sequence[str], work: Work) -> tuple[str, ...]:
    """Return the command that launched a task, without --resume; empty for other work."""
    if not isinstance(work, TaskWork):
        return ()
    return (
        *called(command).split(),
        *launcher_args,
        work.task,
        *without_option(work.options, "--resume"),
    )


def _is_question(task: TaskWork) -> bool:
    """Return True for help, or for a tool of the task (`predict`): no training."""
    if not task.options:
        return False
    return bool({"-h", "--help"} & set(task.options)) or not task.options[0].startswith("-")
