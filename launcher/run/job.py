"""A job: its work and its limits."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, TypeAlias

from rackrun.commandline.ranges import Between, Seconds, refuse_out_of_range
from rackrun.run_folder import RunFolder, file_name, folder_name, new_run_folder
from rackrun.runs import SHORT_ID
from rackrun.units import MOST_SECONDS

TRAINING = ("-u", "-m", "rackrun.training")
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


def _from(least: float) -> Between:
    return Between(least, MOST_SECONDS, f"between {least:g} s and a century")


@dataclass(frozen=True)
class Limits:
    """Time limits."""

    lease_seconds: Annotated[float, _from(1)] = 15.0
    """Heartbeat timeout: a silent host is lost; a host that gets no heartbeats ends its ranks."""

    hang_seconds: Annotated[float, _from(0.1)] = 60.0
    """A rank without a new step for this long (or 10 median steps, if longer) hangs."""

    checkpoint_seconds: Seconds = 30.0
    """Time to save a checkpoint between SIGTERM and SIGKILL when you stop the run."""

    rendezvous_seconds: Annotated[float, _from(1)] = 300.0
    """Time for all hosts to join torchrun's rendezvous."""

    silent_minutes: Annotated[float, Between(0, MOST_SECONDS / 60, "0 or more")] = 0.0
    """For scripts that never report: minutes without output after which ranks hang; 0: never."""

    def __post_init__(self) -> None:
        """Refuse what leaves no time for anything."""
        refuse_out_of_range(self)


@dataclass(frozen=True)
class JobTemplate:
    """Values that the jobs of all attempts of a launch share."""

    name: str = ""
    """Name of the run folders, which `--resume latest` looks for; empty: what runs."""
    runs: Path = Path("runs")
    """The folder of run folders."""
    environment: tuple[tuple[str, str], ...] = ()
    """Set for every rank on every host, over what the host itself sets."""
    secrets: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Set likewise, but never shown or written down."""
    limits: Limits = Limits()
    share: bool = False
    """Other accounts may read the run folders, as far as the umask permits."""
    typed: tuple[str, ...] = ()
    """The command that launched a task, without --resume; empty for a user's own command."""
    time_limit_seconds: float = 0.0
    """After this time the run is stopped, with a checkpoint; 0: never."""
    on_event: tuple[str, ...] = ()
    """The command that is run at a stall, a lost host, a restart and the end."""
    settings: str = ""
    """The content of the settings file."""
    hosts: str = ""
    """The content of hosts.json."""
    commit: str = ""
    """The git commit of the launcher's code, for ranks where git does not know it."""

    def new_folder(self, work: Work) -> RunFolder:
        """Make a run folder for this work."""
        return new_run_folder(self.runs, self.name or work.name, self.share)

    def planned_folder(self, work: Work) -> RunFolder:
        """Return a run folder that is not made, for a plan that is only shown."""
        return RunFolder((self.runs / folder_name(self.name or work.name)).resolve())

    def job(self, work: Work, folder: RunFolder) -> Job:
        """Return the job of the first attempt."""
        return Job(work, folder, template=self)

    def resume_command(self, run: str) -> tuple[str, ...]:
        """Return the command that continues the run in this folder, if one was typed."""
        return (*self.typed, "--resume", str(self.runs / run)) if self.typed else ()


@dataclass(frozen=True)
class Job:
    """One run: what every rank does, and the rules it runs under."""

    work: Work
    folder: RunFolder
    run_id: str = field(default_factory=lambda: secrets.token_hex(16))
    """128 random bits: names an attempt on every host, and guards its rendezvous."""
    template: JobTemplate = JobTemplate()

    @property
    def name(self) -> str:
        """Return the name of the run; its folder has the time before it."""
        return file_name(self.template.name or self.work.name)

    def again(self) -> Job:
        """Return the job of the next attempt, in the same folder; its id begins alike."""
        run_id = self.run_id[:SHORT_ID] + secrets.token_hex(16)[SHORT_ID:]
        return replace(
            self, run_id=run_id, folder=replace(self.folder, attempt=self.folder.attempt + 1)
        )

    @property
    def resume(self) -> tuple[str, ...]:
        """Return the command that continues it from its newest checkpoint, if one was typed."""
        return self.template.resume_command(self.folder.path.name)


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
    for index in _positions_of(work, "--data"):
        joined = options[index].startswith("--data=")
        options[index] = f"--data={data}" if joined else data
    return replace(work, options=tuple(options))


def option_of(work: Work, option: str) -> str:
    """Return the value of a task's option that counts, the last one; empty where none is given."""
    return (values_of(work, option) or [""])[-1]


def values_of(work: Work, option: str) -> list[str]:
    """Return all values that a task's option is given; none for a command."""
    if not isinstance(work, TaskWork):
        return []
    return [work.options[n].removeprefix(f"{option}=") for n in _positions_of(work, option)]


def _positions_of(work: TaskWork, option: str) -> list[int]:
    """Return the positions of the arguments that hold an option's values."""
    return [
        position
        for position, arg in enumerate(work.options)
        if arg.startswith(f"{option}=") or (position and work.options[position - 1] == option)
    ]


def without_option(options: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the options without one of them and its value."""
    left: list[str] = []
    skip = False
    for arg in options:
        if not skip and arg != name and not arg.startswith(f"{name}="):
            left.append(arg)
        skip = arg == name and not skip
    return tuple(left)
