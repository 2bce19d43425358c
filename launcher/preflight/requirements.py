"""What a launch asks of every host: what is to run there, and what that needs."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rackrun.contract.task_needs import TaskNeeds
from rackrun.launcher.files.working_tree import WorkingTree
from rackrun.launcher.run.container import ContainerSpec, container_of
from rackrun.launcher.run.job import (
    FunctionCall,
    TaskWork,
    Work,
    data_of,
    is_on_cpu,
    is_own_command,
    option_of,
)
from rackrun.launcher.run.planned_host import Environment
from rackrun.launcher.run.settings import HostOptions
from rackrun.machine import typed_folder

SYNCED_PACKAGES = ("click", "msgspec")
"""Those that every task needs and no torch brings."""


def _turn() -> str:
    """Return a turn in the queue, as text to sort, after all that were given before."""
    return f"{time.time():.6f}-{secrets.token_hex(4)}"


@dataclass(frozen=True)
class Requirements:
    """What is to run on hosts, and what they must meet for it."""

    work: Work
    options: HostOptions = HostOptions()
    is_here: bool = False
    """The only host is this machine, which no launch has for itself: it is not locked."""
    synced: bool = False
    """--sync brings the code, and an environment."""
    needs: TaskNeeds = TaskNeeds()
    """What the settings of the task need."""
    code: WorkingTree | None = None
    """What the code of hosts is compared with; None for a folder without git."""
    pending: Mapping[str, str] = field(default_factory=dict)
    """Checks that hosts need not pass yet, and what the launch will do about them."""
    turn: str = field(default_factory=_turn)
    """The place in the queue of those who wait for hosts; empty: before all."""
    full: bool = False
    """Everything is asked, as for --check."""
    chooses: bool = False
    """Some of the hosts, or of their GPUs, will be taken: none is held before, no data are read."""

    @property
    def workdir(self) -> str:
        """The working directory, unless hosts.txt names another; relative to the home directory."""
        here = folder_here() if self.is_here else str(typed_folder())
        return self.options.workdir or here

    @property
    def environment(self) -> Environment:
        """What is set for the ranks; some of it authenticates them to a server of shards."""
        return (*self.options.environment, *self.options.secrets)

    @property
    def image(self) -> ContainerSpec | None:
        """The image that the ranks run in; None: they run on the host itself."""
        return container_of(self.options.image, self.options.volume)

    @property
    def data(self) -> str:
        """The shard folder or URL that the ranks will read."""
        return "" if self.chooses else data_of(self.work)

    @property
    def waits(self) -> bool:
        """Whether it queues when hosts are busy."""
        return self.options.wait and not self.full

    @property
    def own_command(self) -> bool:
        """Whether ranks run a command of the user's own, in the environment of a uv.lock."""
        return is_own_command(self.work)

    @property
    def on_cpu(self) -> bool:
        """Whether the task trains on the CPU, so that GPUs do not matter."""
        return is_on_cpu(self.work)

    @property
    def on_gpus(self) -> bool:
        """Whether the task trains on GPUs, or not at all."""
        return option_of(self.work, "--device") == "cuda"

    @property
    def task_needs(self) -> TaskNeeds:
        """What the task needs, with the packages that its interpreter must have for any task.

        What --sync will bring need not be there.
        """
        packages = self.needs.packages
        if isinstance(self.work, FunctionCall):  # rackrun calls it on each rank
            packages = ("rackrun",)
        elif isinstance(self.work, TaskWork) and "python" in self.pending:
            packages = tuple(name for name in packages if name not in SYNCED_PACKAGES)
        elif isinstance(self.work, TaskWork) and not self.synced:
            packages = ("rackrun", *packages)
        return replace(self.needs, packages=packages)


def folder_here() -> str:
    """Return a path of the current folder that JSON can carry: one in UTF-8."""
    folder = os.fsencode(typed_folder())
    try:
        return folder.decode()
    except UnicodeDecodeError:
        return f"/proc/{os.getpid()}/cwd"
