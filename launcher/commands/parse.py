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
from typing import Any, TypeVar

from rackrun.commandline import parser, removed
from rackrun.commandline.help_page import Head
from rackrun.commandline.options import HELP, Option, options
from rackrun.commands import LAUNCHES, NAMES, called, is_command
from rackrun.contract import variables
from rackrun.contract.files import LATEST
from rackrun.errors import UsageError
from rackrun.launcher.commands.settings import SshOptions
from rackrun.launcher.run.job import (
    JobTemplate,
    TaskWork,
    Work,
    command_of,
    option_of,
    values_of,
    without_option,
)
from rackrun.launcher.run.nested import nested_launcher
from rackrun.launcher.run.settings import Options
from rackrun.launcher.run.url import check_url
from rackrun.launcher.settings_file import (
    HOSTS,
    NO_FILE,
    SettingsFile,
    file_in,
    launcher_words,
    read_settings,
    settings_text,
    typed_options,
    with_place,
    without_file,
    work_words,
)
from rackrun.user_code.tasks import OWN_TASK, find_task, known_tasks, why_no_task

TYPED_ONLY = {
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
"""The options of a command."""
AnyOptions = TypeVar("AnyOptions", bound=Options)
"""The options of a way to launch."""


def split(
    args: Sequence[str], settings: type[Options], plain_words: int = 0
) -> tuple[list[str], list[str]]:
    """Return the launcher's options and `plain_words` first words; and the rest, task first."""
    launcher_args: list[str] = []
    rest = list(args)
    while rest and rest[0] != "--":
        arg = rest[0] = parser.dashed(rest[0])
        if not arg.startswith("-"):
            if not plain_words:
                break
            plain_words -= 1
        launcher_args.append(rest.pop(0))
        name = RENAMED.get(arg, arg)
        if name not in names_of(settings):  # --check goes on here, and no longer in convert
            parser.refuse_removed(name)  # whether it took a value is not known any more
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
    run = option_of(work, "--resume")
    resume = ("--resume", run) if again and run else ()
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
    hints: dict[str, str] = {}
    if issubclass(settings, Options):
        typed_first = f"{called(name)} {'hosts.txt ' if settings is SshOptions else ''}catdog"
        hint = f"an option of tasks, and goes behind one, as in: {typed_first}"
        hints = _hints_of(settings) | {option: f"{hint} {option}" for option in OF_TASKS}
    if head:
        tasks = f"Tasks: {', '.join(known_tasks())}, or your own: {OWN_TASK}."
        head = replace(head, foot=f"{tasks}\n\n{head.foot}")
    return parser.parse(settings, called(name), args, head, RENAMED, hints)


def _hints_of(settings: type[Options]) -> dict[str, str]:
    # hints for options that other commands and other launchers have, but not this one
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
    names = {_as_field(theirs): _as_field(ours) for theirs, ours in RENAMED.items()}
    given = {names.get(name, name): value for name, value in values.items()}
    for name, instead in TYPED_ONLY.items():
        if given.get(name):
            raise UsageError(f"{name} is for the command line: {instead}")
    rows = {row.field: row for row in options(settings)}
    if unknown := given.keys() - rows:
        first = min(unknown)
        if why := removed.OPTIONS.get(f"--{first.replace('_', '-')}"):
            raise UsageError(f"{first}: no longer an option; {why}")
        raise UsageError(f"launch has no option {first!r}")
    return parser.built(
        settings, {rows[name].whole: _converted(rows[name], value) for name, value in given.items()}
    )


def _as_field(option: str) -> str:
    # --nproc-per-node -> nproc_per_node
    return option.removeprefix("--").replace("-", "_")


def _converted(option: Option, value: Any) -> Any:
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

    The launcher's options may not appear among a task's. A task that is called for help, or for a
    tool of its own, replaces this process.
    """
    prog = called(name)
    if is_command(rest[:1]):
        command, *args = rest
        before, after = split(launcher_args, settings)  # the host file, and options behind it
        args = [*_taken_by(command, [*before, *after[1:]], after[:1]), *args]
        typed_first = f"{called(command)} {shlex.join(args)}".rstrip()
        raise UsageError(f"{command} is a command, and comes first: {typed_first}")
    work = work_of(rest, (*prog.split(), *launcher_args))
    if isinstance(work, TaskWork):
        is_help = not {"-h", "--help"}.isdisjoint(work.options)
        is_tool = bool(work.options) and not work.options[0].startswith("-")  # such as predict
        if is_help or is_tool:
            sys.stdout.flush()
            before_task = shlex.join([*prog.split(), *launcher_args])
            environment = {**os.environ, variables.TYPED: before_task}
            os.execve(sys.executable, work.argv(sys.executable), environment)
        _refuse_misplaced(prog, launcher_args, settings, work)
    return work


_OF_RUNS = ("attach", "logs", "status", "stop")
"""The commands that take the hosts of a run as --hosts FILE."""


def _taken_by(command: str, options: Sequence[str], file: Sequence[str]) -> list[str]:
    if command in LAUNCHES:
        return [*options, *file]
    options = [option for option in options if option != "--plain"]
    if command in ("rack", "ps"):
        return [*options, *file]
    hosts = ["--hosts", *file] if file else []
    return [*options, *hosts] if command in _OF_RUNS else []


def _refuse_misplaced(
    prog: str, launcher_args: Sequence[str], settings: type[Options], task: TaskWork
) -> None:
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
        if why := nested_launcher(rest[1:]):
            raise UsageError(why)
        return command_of(rest[1:])
    if not find_task(rest[0]):
        raise UsageError(_no_task(rest, before))
    name = rest[0]
    if Path(name).is_absolute() and Path(name).is_relative_to(Path.cwd()):
        name = str(Path(name).relative_to(Path.cwd()))  # which is the same on every host
    task = TaskWork(name, tuple(map(_with_latest_run_named, rest[1:])))
    for data in values_of(task, "--data"):
        if "://" in data:
            check_url(data)
    return task


def _no_task(args: Sequence[str], before: Sequence[str]) -> str:
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
    is_program = script or name.endswith(".sh") or shutil.which(name)
    program = [*script, *args] if is_program else ["python", "train.py"]
    return f"{why}; for a command of your own: {shlex.join([*before, '--', *program])}"


def _with_latest_run_named(option: str) -> str:
    # Below `runs/latest` means in the run that it links to now: this launch will move the link.
    name, _, value = option.rpartition("=")
    path = Path(value)
    for link in (path, *path.parents):
        if link.name == LATEST and link.is_symlink():
            run = link.with_name(link.readlink().name)
            return f"{name}{name and '='}{run / path.relative_to(link)}"
    return option


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
