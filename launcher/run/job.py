"""A job: what ranks run, where, and under which options."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from rackrun.launcher.run.settings import Options
from rackrun.run_folder import RunFolder, file_name
from rackrun.runs import SHORT_ID

TASK_MODULE = ("-m", "rackrun.training")
TRAINING = ("-u", *TASK_MODULE)
"""What a rank of a task runs; its name and options follow."""


@dataclass(frozen=True)
class TaskWork:
    """A task, which `training` runs in every rank, with the task's options."""

    task: str
    """As it is typed: its name, import path or file."""
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return a short name, for the run folder."""
        return Path(self.task).stem if self.task.endswith(".py") else self.task.split(".")[-1]

    def argv(self, python: str) -> tuple[str, ...]:
        """Return the command line of one rank, on a host whose interpreter is `python`."""
        return (python, *TRAINING, self.task, *self.options)


PYTHONS = ("python", "python3")
"""The programs of a command that stand for the interpreter of the host."""


@dataclass(frozen=True)
class Command:
    """A user's own command, run by every rank; `python` means the interpreter of the host."""

    args: tuple[str, ...]

    @property
    def name(self) -> str:
        """A short name for the run folder: the script if there is one, else the program."""
        scripts = [arg for arg in self.args if arg.endswith((".py", ".sh"))]
        return Path((scripts or list(self.args))[0]).stem

    def argv(self, python: str) -> tuple[str, ...]:
        """Return the command line of one rank."""
        return (python, *self.args[1:]) if self.args[0] in PYTHONS else self.args


@dataclass(frozen=True)
class FunctionCall(Command):
    """A function of the user that every rank calls; what it returns comes back."""

    @property
    def target(self) -> str:
        """Return the import path of the function."""
        return self.args[-2]

    @property
    def name(self) -> str:
        """Return the function's own name."""
        return re.split("[.:]", self.target)[-1]


CALL = ("python", "-u", "-m", "rackrun.user_code.call")
"""How the command of a FunctionCall begins; its import path and its arguments follow."""


def command_of(args: Sequence[str]) -> Command:
    """Return the command of these arguments."""
    is_call = tuple(args[: len(CALL)]) == CALL and len(args) == len(CALL) + 2
    return (FunctionCall if is_call else Command)(tuple(args))


Work: TypeAlias = TaskWork | Command


RUN_ID = r"[0-9a-f]{32}"
"""The grammar of a run's id, which other machines may send."""
START_SECONDS = 60.0
"""Time for the agents of all hosts to answer after the start."""


@dataclass(frozen=True)
class Job:
    """One attempt of a run: what every rank does, where, and under which options."""

    work: Work
    folder: RunFolder
    options: Options = Options()
    run_id: str = field(default_factory=lambda: secrets.token_hex(16))
    """128 random bits: names an attempt on every host, and guards its rendezvous."""
    seconds_left: float = 0.0
    """After this time the run is stopped, with a checkpoint; 0: never."""
    commit: str = ""
    """The git commit of the launcher's code, for ranks where git does not know it."""

    @property
    def name(self) -> str:
        """Return the name of the run."""
        return run_name(self.options, self.work)

    def again(self) -> Job:
        """Return the job of the next attempt, in the same folder; its id begins alike."""
        run_id = self.run_id[:SHORT_ID] + secrets.token_hex(16)[SHORT_ID:]
        return replace(
            self, run_id=run_id, folder=replace(self.folder, attempt=self.folder.attempt + 1)
        )


def run_name(options: Options, work: Work) -> str:
    """Return the name of a run; its folder has the time before it."""
    return file_name(options.name or work.name)


def is_own_command(work: Work) -> bool:
    """Return True for a command or function of the user's, and False for rackrun's own programs."""
    return isinstance(work, Command) and work.args[1 : 1 + len(TRAINING)] != TRAINING


def is_on_cpu(work: Work) -> bool:
    """Return True for a task whose options ask for the CPU."""
    return option_of(work, "--device") == "cpu"


def data_of(work: Work) -> str:
    """Return the shards in a task's options; empty for a command, whose arguments are its own."""
    return option_of(work, "--data")


def with_data(work: Work, data: str) -> Work:
    """Return the task with other shards in place of its own."""
    if not isinstance(work, TaskWork):
        return work
    options = list(work.options)
    for index in _positions_of(options, "--data"):
        joined = options[index].startswith("--data=")
        options[index] = f"--data={data}" if joined else data
    return replace(work, options=tuple(options))


def option_of(work: Work, option: str) -> str:
    """Return the value of a task's option that counts; empty where none is given."""
    return value_in(work.options, option) if isinstance(work, TaskWork) else ""


def value_in(words: Sequence[str], option: str) -> str:
    """Return the value of an option that counts, the last one; empty where none is given."""
    return (values_in(words, option) or [""])[-1]


def values_in(words: Sequence[str], option: str) -> list[str]:
    """Return all values that an option is given."""
    return [words[n].removeprefix(f"{option}=") for n in _positions_of(words, option)]


def _positions_of(words: Sequence[str], option: str) -> list[int]:
    """Return the positions of the words that hold an option's values."""
    return [
        position
        for position, word in enumerate(words)
        if word.startswith(f"{option}=") or (position and words[position - 1] == option)
    ]


def without_option(words: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the words without an option and its value."""
    left: list[str] = []
    skip = False
    for word in words:
        if not skip and word != name and not word.startswith(f"{name}="):
            left.append(word)
        skip = word == name and not skip
    return tuple(left)
