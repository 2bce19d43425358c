"""The launcher's command line: options from dataclasses, then a task or command."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

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
from launcher.lifecycle.restart_policy import without
from launcher.lifecycle.task_check import become_task
from launcher.run.job import JobTemplate, Limits, TaskWork, Work, all_data_of, command_of
from launcher.run.settings import SCALING, Options, Serving
from launcher.run.url import check_url
from rackrun import commandline
from rackrun.commands import called
from rackrun.contract.files import LATEST
from rackrun.errors import UsageError
from rackrun.help.options import groups
from rackrun.help.page import HELP, Head, show
from rackrun.user_code.tasks import OWN, find_task, known_tasks, why_no_task

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
    "--allow": "--ignore-check",
    "--go-on": "--auto-resume",
    "--now": "--force",
    "--nproc-per-node": "--nproc",  # torchrun's word, which stays, as do the following
    "--num-processes": "--nproc",
    "--num-gpus": "--nproc",
    "--np": "--nproc",
    "-np": "--nproc",
    "--master-port": "--port",
    "-H": "--host-list",
}
"""Other spellings of options: old ones, for one more release, and those of other launchers."""

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

Settings = TypeVar("Settings")

AnyOptions = TypeVar("AnyOptions", bound=Options)
"""The options of one way to launch."""


def split(
    args: Sequence[str], settings: type[Options], words: int = 0
) -> tuple[list[str], list[str]]:
    """Return the launcher's options and first `words` plain words; and the rest, task first."""
    own: list[str] = []
    rest = list(args)
    while rest and rest[0] != "--":
        word = rest[0]
        if not word.startswith("-"):
            if not words:
                break
            words -= 1
        own.append(rest.pop(0))
        name = RENAMED.get(word, word)
        if name.startswith("-") and "=" not in name and rest and name not in flags(settings):
            own.append(rest.pop(0))
    return own, rest


def hoisted(own: Sequence[str], rest: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the launcher's options and the task's, `--scaling` among the former in any place."""
    taken, kept = list(own), list(rest)
    for place, word in enumerate(rest if rest[:1] != ["--"] else ()):
        if word.partition("=")[0] == SCALING:
            words = 1 if "=" in word else 2
            taken += kept[place : place + words]
            del kept[place : place + words]
            break
    return taken, kept


def takes_settings_file(
    settings: type[Options], words: int = 0
) -> Callable[[Callable[[Sequence[str]], int]], Callable[[Sequence[str]], int]]:
    """Let a command take --config FILE, whose settings come before the typed words.

    An error about an option of the file names file and key. `words` are the plain words that come
    before the task, as in `split`.
    """

    def decorate(main: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
        def main_with_file(args: Sequence[str]) -> int:
            name = file_in(split(args, settings, words)[0])
            if not name:
                return main(args)
            file = read_settings(Path(name))
            try:
                return main(with_settings(file, args, settings, words))
            except UsageError as error:
                raise with_place(error, file, args) from None

        return main_with_file

    return decorate


def with_settings(
    file: SettingsFile, args: Sequence[str], settings: type[Options], words: int = 0
) -> list[str]:
    """Return a command line with the settings of a file; typed options take precedence."""
    own, rest = split(args, settings, words)
    before, work = split(args, settings)
    hosts: list[str] = []
    if words and HOSTS in file.launcher and (not work or work[0] == "--" or find_task(work[0])):
        own, rest = before, work  # no host file was typed
        names = {word.partition("=")[0] for word in commandline.current_names(own, RENAMED)}
        hosts = [] if names & NO_FILE else [str(file.launcher[HOSTS])]
    typed_here = typed_options(list(commandline.current_names(own, RENAMED)))
    words_of_file = launcher_words(file, settings, typed_here)
    return [*words_of_file, *without_file(own), *hosts, *work_words(file, rest)]


def recorded(way: str, options: Options, work: Work, again: tuple[str, ...] = ()) -> JobTemplate:
    """Return the template of a launch's jobs, with the command `again` and its settings file."""
    return replace(options.jobs, typed=again, settings=settings_text(way, options, work))


def flags(settings: type[Options]) -> set[str]:
    """Return the options that take no value."""
    return {*HELP, *switches(settings)}


def names_of(settings: type[Any]) -> Iterator[str]:
    """Yield all options."""
    for name, kind in get_type_hints(settings).items():
        if isinstance(kind, type) and is_dataclass(kind):
            yield from names_of(kind)
        else:
            yield f"--{name.replace('_', '-')}"


def switches(settings: type[Any]) -> Iterator[str]:
    """Return the options that take no value."""
    for name, kind in get_type_hints(settings).items():
        if kind is bool:
            yield f"--{name.replace('_', '-')}"
            yield f"--no-{name.replace('_', '-')}"
        elif isinstance(kind, type) and is_dataclass(kind):
            yield from switches(kind)


def parse(settings: type[Settings], name: str, args: Sequence[str], head: Head | str) -> Settings:
    """Return the options of a command as a dataclass; raise UsageError for bad usage. --help exits.

    `{prog}` in the head of the help becomes the command as the user calls it.
    """
    prog = called(name)
    if isinstance(head, Head) and HELP & set(args):
        show(launching(head, prog), groups(settings))
    from tyro.conf import FlagCreatePairsOff, UseAppendAction  # not needed where no option is given

    markers = (FlagCreatePairsOff, UseAppendAction)
    about = head.replace("{prog}", prog) if isinstance(head, str) else None
    answers = _answers_of(settings)
    words = _without_switched_off(settings, args)
    return commandline.parse(settings, prog, words, about, markers, RENAMED, answers)


def launching(head: Head, prog: str) -> Head:
    """Return the head of a way to launch, with the tasks that can be launched below the options."""
    tasks = f"Tasks: {', '.join(known_tasks())}, or your own: {OWN}."
    return replace(head, foot=f"{tasks}\n\n{head.foot}").of(prog=prog)


def _without_switched_off(settings: type[Any], args: Sequence[str]) -> list[str]:
    """Return the words without `--no-wait` and the like, which only change a settings file."""
    left, known = list(args), set(names_of(settings))
    off = {name for name in switches(settings) if name.startswith("--no-") and name not in known}
    for word in [word for word in args if word in off]:
        place = left.index(word)
        on = f"--{word.removeprefix('--no-')}"
        left = [other for other in left[:place] if other != on] + left[place + 1 :]
    return left


def _answers_of(settings: type[Any]) -> dict[str, str]:
    """Return the answers to options that other commands have, but not this one."""
    if not issubclass(settings, Options):
        return {}
    known = set(names_of(settings)) - {"--hosts"}  # the host file, which has no option
    of_hosts = {name: f"only for hosts: {{ssh}} {name}" for name in names_of(SshOptions)}
    answers = {**of_hosts, "--nproc": SLOTS, "--hosts": FIRST_WORD, **ELSEWHERE}
    return {
        name: answer.replace("{ssh}", called("ssh"))
        for name, answer in answers.items()
        if name not in known
    }


def from_names(settings: type[AnyOptions], values: Mapping[str, Any]) -> AnyOptions:
    """Return the options given by name in Python; raise UsageError for an unknown one."""
    names = {_as_field(old): _as_field(new) for old, new in RENAMED.items()}
    outer = {names.get(name, name): value for name, value in values.items()}
    for name, instead in TYPED_ONLY.items():
        if outer.get(name):
            raise UsageError(f"{name} is for the command line: {instead}")
    serving, limits = _taken(outer, Serving), _taken(outer, Limits)
    own = _taken(outer, settings)
    if outer:
        raise UsageError(f"launch has no option {min(outer)!r}")
    groups: dict[str, Any] = {"serving": Serving(**serving), "limits": Limits(**limits)}
    return settings(**(groups | own))


def _as_field(option: str) -> str:
    """Return the name of an option as Python has it: `--nproc-per-node` -> `nproc_per_node`."""
    return option.removeprefix("--").replace("-", "_")


def _taken(values: dict[str, Any], group: type[Any]) -> dict[str, Any]:
    """Remove the values of a group of options from all values, and return them as its fields."""
    kinds = get_type_hints(group)
    names = [field.name for field in fields(group) if field.name in values]
    return {name: _meant(name, kinds[name], values.pop(name)) for name in names}


def _meant(name: str, kind: Any, value: Any) -> Any:
    """Return a value from Python as the type of a field; raise UsageError if it does not fit."""
    if kind in (Path, str) and isinstance(value, str | os.PathLike):
        return kind(os.fspath(value))
    if kind is float and isinstance(value, int):
        return float(value)
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        return tuple(value)
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    wanted = "a list" if get_origin(kind) is tuple else f"of type {kind.__name__}"
    raise UsageError(f"{name}={value!r}: must be {wanted}")


def read_work(
    name: str, settings: type[Options], own: Sequence[str], rest: Sequence[str]
) -> Work | None:
    """Return the task or command to run; raise UsageError with what was probably meant.

    `own` are the launcher's options, which may not appear among a task's. A task that is called for
    something other than training replaces this process.
    """
    prog = called(name)
    work = work_of(rest, (*prog.split(), *own))
    if isinstance(work, TaskWork):
        if _is_question(work):
            become_task(work, shlex.join([*prog.split(), *own]))
        _refuse_misplaced(prog, own, settings, work)
    return work


def _refuse_misplaced(
    prog: str, own: Sequence[str], settings: type[Options], task: TaskWork
) -> None:
    """Refuse launcher options after a task; the message has the intended command."""
    names, answers = set(names_of(settings)), _answers_of(settings)
    ours: list[str] = []
    kept: list[str] = []
    words = iter(task.options)
    for word in words:
        name = next(commandline.current_names([word.partition("=")[0]], RENAMED))
        if name in answers:
            raise UsageError(f"{name}: {answers[name]}")
        if name not in names:
            kept.append(word)
            continue
        has_value = "=" not in word and name not in flags(settings)
        ours += [word, *([next(words, "")] if has_value else [])]
    if ours:
        meant = shlex.join([*ours, *own, task.task, *kept])
        raise UsageError(f"{ours[0].partition('=')[0]} goes before {task.task}: {prog} {meant}")


def work_of(rest: Sequence[str], before: Sequence[str] = ()) -> Work | None:
    """Return the task with its options, the command after `--`, or None.

    `before` are the words before, for a better command line in a UsageError.
    """
    if not rest:
        return None
    if rest[0] == "--":
        if not rest[1:]:
            raise UsageError("-- needs a command; for example: -- python train.py")
        return command_of(rest[1:])
    if not find_task(rest[0]):
        raise UsageError(_no_task(rest, before))
    task = TaskWork(_there_as_here(rest[0]), tuple(map(_with_latest_run_named, rest[1:])))
    for data in all_data_of(task):
        if "://" in data:
            check_url(data)
    return task


def _no_task(words: Sequence[str], before: Sequence[str]) -> str:
    """Return why these words are not a task with options, and what was probably meant."""
    word = words[0]
    if word.endswith((".txt", ".hosts")) or Path(word).name == "hostfile":
        return f"{word!r} is no task; for the hosts of a file: {called('ssh')} {shlex.join(words)}"
    why = why_no_task(word)
    script = ["python"] if word.endswith(".py") else []
    if "did you mean" in why or (script and not Path(word).is_file()):
        return why
    program = [*script, *words] if script or _is_program(word) else ["python", "train.py"]
    return f"{why}; for a command of your own: {shlex.join([*before, '--', *program])}"


def _with_latest_run_named(option: str) -> str:
    """Return the run that `runs/latest` links to now: this launch will move the link."""
    name, _, value = option.rpartition("=")
    path = Path(value)
    if path.name != LATEST or not path.is_symlink():
        return option
    return f"{name}{name and '='}{path.with_name(path.readlink().name)}"


def _there_as_here(task: str) -> str:
    """Return a file of this folder by its relative path, which is the same on every host."""
    below = Path(task).is_absolute() and Path(task).is_relative_to(Path.cwd())
    return str(Path(task).relative_to(Path.cwd())) if below else task


def _is_program(word: str) -> bool:
    return word.endswith(".sh") or shutil.which(word) is not None


def typed(command: str, own: Sequence[str], work: Work) -> tuple[str, ...]:
    """Return the command that launched a task, without --resume; empty for other work."""
    if not isinstance(work, TaskWork):
        return ()
    return (*called(command).split(), *own, work.task, *without(work.options, "--resume"))


def _is_question(task: TaskWork) -> bool:
    """Return True for help, or for a tool of the task (`predict`): no training."""
    if not task.options:
        return False
    return bool({"-h", "--help"} & set(task.options)) or not task.options[0].startswith("-")
