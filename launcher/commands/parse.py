"""A launch's command line: its options, and after them a task or a command.

    rackrun ssh --sync hosts.txt catdog --epochs 3 --plain     options of the launch stand anywhere,
    rackrun ssh hosts.txt -- python train.py                   but not behind two dashes

An option of a task stands behind its name. What the launch does not know is the task's.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import click
from click.core import ParameterSource

from rackrun.commandline import parser, removed
from rackrun.commandline.command import SettingsCommand
from rackrun.commandline.help_page import Head
from rackrun.commandline.options import HELP, Option, options
from rackrun.commandline.parser import Values
from rackrun.commands import called, is_command
from rackrun.contract import variables
from rackrun.contract.task_needs import TaskNeeds
from rackrun.errors import UsageError
from rackrun.launcher.commands.settings import NodeOptions, SshOptions
from rackrun.launcher.commands.work import refuse_command, refuse_no_host_file, work_of
from rackrun.launcher.output.console import say
from rackrun.launcher.run.job import TaskWork, Work
from rackrun.launcher.run.settings import LocalOptions, Options
from rackrun.launcher.settings_file import (
    HOSTS,
    NO_FILE,
    SettingsFile,
    launcher_values,
    read_settings,
    typed_options,
    with_place,
    work_words,
)
from rackrun.user_code.tasks import OWN_TASK, find_task, known_tasks

TYPED_ONLY = ("sweep", "sweep_hosts", "detach", "check", "deep", "dry_run", "json", "config")
"""Options without effect when a run is started from Python."""

SPELLINGS = {
    "--nproc-per-node": "--nproc",
    "--num-processes": "--nproc",
    "--num-gpus": "--nproc",
    "--np": "--nproc",
    "-np": "--nproc",
    "--master-port": "--port",
    "--main-process-port": "--port",
    "-H": "--host-list",
}
"""Options as other launchers call them."""

FIRST_WORD = "the host file is named without an option: {ssh} hosts.txt catdog"
BY_LINES = "the host file says which hosts take part, one per line; to use some of them: --include"
NOT_NEEDED = "not needed: ranks meet at the first host of the host file"
SLOTS = "write slots=2 after the host's name in the host file"
IN_LINES = "write it in the host file, as in jo@gpu01:2222, or in ssh_config"
IN_COMMAND = "type it in the command: -- python -m MODULE"
IN_LOGS = "not needed: all that ranks print is in runs/latest/logs"
CHOSEN = "for some GPUs of hosts: --include gpu01:0,1; of this machine: CUDA_VISIBLE_DEVICES=0,1"

ELSEWHERE = {
    **dict.fromkeys(("--hostfile", "--hosts-file", "--machinefile"), FIRST_WORD),
    **dict.fromkeys(("--nnodes", "--num-nodes", "--num-machines", "--num-hosts"), BY_LINES),
    **dict.fromkeys(("--node-rank", "--machine-rank"), BY_LINES),
    **dict.fromkeys(("--master-addr", "--rdzv-endpoint", "--rdzv-backend"), NOT_NEEDED),
    **dict.fromkeys(("--rdzv-id", "--standalone", "--main-process-ip"), NOT_NEEDED),
    "--rdzv-conf": "for its timeout: --rendezvous-seconds",
    **dict.fromkeys(("--gpus", "--gpu-ids", "--devices"), CHOSEN),
}
"""Options of torchrun, accelerate, DeepSpeed and mpirun, and what to type instead."""

BEFORE_WORK = {
    **dict.fromkeys(("--user", "--ssh-port"), IN_LINES),
    **dict.fromkeys(("--module", "-m"), IN_COMMAND),
    **dict.fromkeys(("--log-dir", "--redirects", "--tee"), IN_LOGS),
}
"""The same, but for names that a task of one's own may well have."""

OF_TASKS = (
    *("--batch-size", "--data", "--device", "--epochs", "--image-size", "--lr", "--model"),
    *("--optimizer", "--precision", "--recipe", "--resume", "--synthetic", "--weights"),
)
"""Options of every task that are typed before one, or without one."""

AnyOptions = TypeVar("AnyOptions", bound=Options)
"""The options of a method of launching."""


@dataclass(frozen=True)
class CommandLine(Generic[AnyOptions]):
    """What was typed, and what its settings file says."""

    options: AnyOptions
    launch_words: tuple[str, ...]
    """The options of the launch as words, and the host file."""
    work: Work | None
    file: SettingsFile | None
    typed: frozenset[str]
    """The options on the command line, without their dashes."""

    @contextmanager
    def naming_the_file(self) -> Iterator[None]:
        """Name the settings file in an error about an option that is from there."""
        with _naming(self.file, self.typed):
            yield


def read(
    command_name: str,
    settings: type[AnyOptions],
    head: Head,
    args: Sequence[str],
    again: SettingsFile | None = None,
) -> CommandLine[AnyOptions]:
    """Return what a command line says, on top of the file of --config or of a run to start `again`.

    Raises UsageError. A task that is called for help replaces this process; --help before a task
    prints ours and exits.
    """
    new_run = again.as_a_new_run() if again else None
    count = args.index("--") if "--" in args else len(args)
    launch_args, command = list(map(_with_long_name, args[:count])), list(args[count:])
    name = "check" if "--check" in launch_args else command_name
    launch = launch_command(settings, name, head)
    for param in launch.params:
        if param.name == "config":
            param.is_eager, param.callback = True, _use_file
    known: dict[str, Any] = {}
    if new_run:
        known = {"default_map": launcher_values(new_run, settings), "obj": new_run}
    context = parser.context_of(launch, launch_args, **known)
    file: SettingsFile | None = context.obj
    typed = frozenset(_typed_in(context))
    with _naming(file, typed):
        words = tuple(words_in(context, left_out="config"))
        _answer_help(launch, context, (*called(name).split(), *words))
        if is_command(context.args):
            refuse_command(context.args, words, ())
        hosts, rest = _host_file(settings, context, words, command)
        options = parser.built(settings, {**parser.values_of(context), **hosts})
        host_words = tuple(map(str, hosts.values()))
        rest = [*_with_task(rest, new_run), *command]
        if rest and rest[0] != "--" and rest[0].startswith("-"):
            _refuse_option(rest, launch, new_run.command if new_run else ())
        rest = work_words(file, rest) if file else rest
        if is_command(rest[:1]):
            refuse_command(rest, words, host_words)
        work = _work(name, settings, (*words, *host_words), rest)
    if again:
        is_anew = again.continues_a_run and "resume" not in typed
        say(f"{again.path.parent} again{', from its beginning' if is_anew else ''}")
    return CommandLine(options, (*words, *host_words), work, file, typed)


@contextmanager
def _naming(file: SettingsFile | None, typed: Collection[str]) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise with_place(error, file, typed) if file else error from None


def _refuse_option(
    rest: Sequence[str], launch: SettingsCommand, command: Sequence[str]
) -> NoReturn:
    """Raise UsageError for an option of neither launch nor task; `command` is a rerun's own."""
    if command:
        raise UsageError(
            f"{rest[0]}: not an option of {launch.name}; to change the run's own command, type all"
            f" of it: -- {shlex.join([*command, *rest])}"
        )
    raise parser.no_such_option(rest[0].partition("=")[0], launch)


def _with_long_name(word: str) -> str:
    # -H=gpu01 by its long name: click takes no "=" behind a short one
    return f"--host-list={word.removeprefix('-H=')}" if word.startswith("-H=") else word


def launch_command(settings: type[Options], name: str, head: Head) -> SettingsCommand:
    """Return a launch as a command of click."""
    hints = partial(hints_of, settings, name)
    head = head.of(prog=called(name))
    return SettingsCommand(
        settings, called(name), head, SPELLINGS, settings, has_work=True, hints=hints
    )


def _use_file(context: click.Context, param: click.Parameter, name: str | None) -> str | None:
    if name and context.obj:
        what = "a run that is started again has its own settings"
        raise UsageError(f"--config {name}: {what}; leave it out")
    if name and isinstance(context.command, SettingsCommand):
        context.obj = file = read_settings(Path(name))
        context.default_map = launcher_values(file, context.command.settings)
    return name


def words_in(context: click.Context, left_out: str = "") -> Iterator[str]:
    """Yield the options that were typed, or that the settings file has, as words, but for one."""
    for param in context.command.params:
        value = context.params.get(param.name or "")
        if value is None or value == () or param.name == left_out:
            continue
        if value is True or value is False:
            yield param.opts[0] if value else f"--no-{param.opts[0].removeprefix('--')}"
            continue
        for each in map(str, value if isinstance(value, tuple) else (value,)):
            yield from [f"{param.opts[0]}={each}"] if each[:1] == "-" else [param.opts[0], each]


def _typed_in(context: click.Context) -> set[str]:
    # The names of options that stand on the command line, without their dashes.
    typed = (
        name.replace("_", "-")
        for name in context.params
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    )
    return {*typed, *typed_options(context.args)}


def _answer_help(
    launch: SettingsCommand, context: click.Context, typed_before: Sequence[str]
) -> None:
    rest = context.args
    if HELP.isdisjoint(rest):
        return
    for index, word in enumerate(rest):
        if word in HELP:
            tasks = f"Tasks: {', '.join(known_tasks())}, or your own: {OWN_TASK}."
            launch.head = replace(launch.head, foot=f"{tasks}\n\n{launch.head.foot}")
            sys.stdout.write(f"{launch.get_help(context)}\n")
            raise SystemExit(0)
        if find_task(word):
            _replace_process(TaskWork(word, tuple(rest[index + 1 :])), typed_before)


def _host_file(
    settings: type[Options], context: click.Context, words: Sequence[str], command: Sequence[str]
) -> tuple[Values, list[str]]:
    # The host file, if the launch takes one, by the path of its field; and the words behind it.
    rest, file = list(context.args), context.obj
    if not hasattr(settings, HOSTS) or NO_FILE & set(words):
        return {}, rest
    in_file = file.launcher.get(HOSTS) if file else None
    if rest and not rest[0].startswith("-") and not (in_file and find_task(rest[0])):
        refuse_no_host_file(words, [*rest, *command])
        return {(HOSTS,): Path(rest[0])}, rest[1:]
    return {(HOSTS,): Path(in_file)} if in_file else {}, rest


def _with_task(rest: list[str], again: SettingsFile | None) -> list[str]:
    # Options behind a run to start again are those of its task.
    if again and again.tasks and rest and rest[0].startswith("-"):
        return [next(iter(again.tasks)), *rest]
    return rest


def _work(
    name: str, settings: type[Options], words: Sequence[str], rest: Sequence[str]
) -> Work | None:
    typed_before = (*called(name).split(), *words)
    work = work_of(rest, typed_before)
    if isinstance(work, TaskWork):
        hints = of_other_launches(settings)
        for option in work.options:
            if hint := hints.get(option.partition("=")[0].replace("_", "-")):
                raise UsageError(f"{option.partition('=')[0]}: {hint}")
    return work


def _replace_process(work: TaskWork, typed_before: Sequence[str]) -> NoReturn:
    """Replace this process by the task, which prints its help itself.

    `typed_before` are the words before the task, which its messages repeat.
    """
    sys.stdout.flush()
    environment = {**os.environ, variables.TYPED: shlex.join(typed_before)}
    os.execve(sys.executable, work.argv(sys.executable), environment)


def hints_of(settings: type[Options], name: str) -> dict[str, str]:
    """Return hints for options that tasks, other commands and other launchers have."""
    typed_first = f"{called(name)} {'hosts.txt ' if settings is SshOptions else ''}catdog"
    hint = f"an option of tasks; type it after the task, as in: {typed_first}"
    of_tasks = {option: f"{hint} {option}" for option in OF_TASKS}
    of_tasks["--mixed-precision"] = of_tasks["--precision"]
    return of_other_launches(settings) | of_tasks | BEFORE_WORK


def of_other_launches(settings: type[Options]) -> dict[str, str]:
    """Return hints for options that other commands and other launchers have."""
    names = {row.name for row in options(settings)}
    of_hosts = {row.name: f"only for hosts: {{ssh}} {row.name}" for row in options(SshOptions)}
    hints = {**of_hosts, "--nproc": SLOTS, "--hosts": FIRST_WORD, **ELSEWHERE}
    hints |= {
        theirs: hints[ours] for theirs, ours in SPELLINGS.items() if ours in hints.keys() - names
    }
    return {
        name: hint.replace("{ssh}", called("ssh"))
        for name, hint in hints.items()
        if name not in names
    }


def refuse_shared(work: Work, needs: TaskNeeds) -> TaskNeeds:
    """Raise UsageError for an own task's option that launches have too, and would take from it."""
    for name in needs.own_options:
        for settings in (SshOptions, NodeOptions, LocalOptions):
            if any(row.key == name for row in options(settings)):
                raise UsageError(
                    f"{work.name}: --{name} is a launcher option; rename the field of the task"
                )
    return needs


def from_names(settings: type[AnyOptions], values: Mapping[str, Any]) -> AnyOptions:
    """Return the options given by name in Python; raise UsageError for an unknown one."""
    names = {_as_field(theirs): _as_field(ours) for theirs, ours in SPELLINGS.items()}
    given = {names.get(name, name): value for name, value in values.items()}
    if typed_only := next(filter(given.get, TYPED_ONLY), ""):
        raise UsageError(f"{typed_only} is for the command line; leave it out")
    rows = {row.field: row for row in options(settings)}
    if unknown := given.keys() - rows:
        first = min(unknown)
        if why := removed.OPTIONS.get(f"--{first.replace('_', '-')}"):
            raise UsageError(f"{first}: no longer an option; {why}")
        raise UsageError(
            f"launch has no option {first!r}; a function gets its arguments by position"
        )
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
