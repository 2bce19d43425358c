"""The options of a launch, as dataclasses: each exists once, with its default and its unit."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from rackrun.commandline.conditions import Condition, changed_settings, refuse_without_effect
from rackrun.commandline.options import Values
from rackrun.commandline.ranges import Between, Count, Seconds, refuse_out_of_range
from rackrun.errors import UsageError
from rackrun.launcher.run.container import container_of
from rackrun.launcher.run.hosts import LAST_PORT, MOST_SLOTS, VARIABLE
from rackrun.terminal import one_line
from rackrun.units import MOST_SECONDS, seconds_in

SERVER = ("serve_address", "serve_port", "serve_native", "serve_image")
"""Settings of the server of a run."""

Ranks = Annotated[int, Between(0, MOST_SLOTS)]
"""A number of ranks on a node."""


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
class OnOptions:
    """SSH."""

    ssh_config: Annotated[str, Values("FILE")] = ""
    """ssh_config file to use instead of your own and the system's."""
    on: Annotated[str, Values("HOST")] = ""
    """Run this command on that host; a launch copies the project there first."""


@dataclass(frozen=True)
class ReachOptions(OnOptions):
    """SSH."""

    accept_new: bool = False
    """Add unknown host keys to known_hosts; changed keys are still refused."""


@dataclass(frozen=True)
class Serving:
    """Serving shards to hosts."""

    serve: bool = False
    """Serve the folder of --data with nginx; the default if hosts are other machines."""
    no_serve: bool = False
    """Do not serve: every host has the folder of --data under the same path."""
    serve_address: Annotated[str, Values("ADDRESS")] = ""
    """Address of this machine to serve from (default: the one with a route to the hosts)."""
    serve_port: int = 0
    """Port to serve from; 0: a free one."""
    serve_native: bool = False
    """Serve with this machine's nginx even if Docker is available."""
    serve_image: Annotated[str, Values("IMAGE")] = ""
    """Container image of nginx (default: the official one, pinned by digest)."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            SERVER, lambda serving: not serving.no_serve, "--no-serve serves nothing", "--serve"
        ),
        Condition(
            ("serve_image",),
            lambda serving: not serving.serve_native,
            "--serve-native starts this machine's nginx, not a container",
        ),
    )

    def __post_init__(self) -> None:
        if self.serve and self.no_serve:
            raise UsageError("--serve and --no-serve exclude each other: leave one of them out")
        refuse_ineffective(self)


@dataclass(frozen=True)
class Options:
    """The run."""

    config: Annotated[str, Values("FILE")] = ""
    """Settings file (TOML): options, task or command; typed options override it."""
    name: Annotated[str, Values("NAME")] = ""
    """Name of the run (default: the task or script)."""
    runs: Annotated[Path, Values("FOLDER")] = Path("runs")
    """Folder for run folders."""
    env: Annotated[tuple[str, ...], Values("NAME[=VALUE]")] = ()
    """Environment variable for every rank: NAME=VALUE, or NAME as set here; repeatable."""
    secret: Annotated[tuple[str, ...], Values("NAME")] = ()
    """Like --env NAME, but the value is never shown or written to a file; repeatable."""
    dry_run: bool = False
    """Print what would run on each host, and start no ranks; shards are served meanwhile."""
    json: bool = False
    """With --dry-run: print the plan as JSON."""
    plain: bool = False
    """Print plain lines instead of the dashboard."""
    time_limit: Annotated[str, Values("TIME")] = ""
    """Save a checkpoint and stop after this time, such as 90m, 2h or 1d12h; exit code 124."""
    on_event: Annotated[str, Values("COMMAND")] = ""
    """Command to run at a stall, a lost host, a restart and the end, with JSON on its input."""
    share: bool = False
    """Let other accounts read run folders, here and on hosts, subject to the umask."""
    serving: Serving = field(default_factory=Serving)
    limits: Limits = field(default_factory=Limits)

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("json",),
            lambda options: options.dry_run or getattr(options, "check", False),
            "a launch prints lines, and writes result.json at the end",
            "--dry-run",
        ),
    )
    """When options have an effect; each class of options has those of its own."""

    def __post_init__(self) -> None:
        refuse_out_of_range(self)
        refuse_ineffective(self)
        # These refuse what cannot be used, before anything is done.
        _ = (self.environment, self.secrets, self.time_limit_seconds, self.on_event_args)

    @property
    def environment(self) -> tuple[tuple[str, str], ...]:
        """The pairs of --env; raises UsageError for one that would not arrive as it is meant."""
        pairs = [pair.partition("=") for pair in self.env]
        for name, _, value in pairs:
            if not VARIABLE.fullmatch(name):
                raise UsageError(f"--env: {name[:40]!r} names no variable; type: NAME=VALUE")
            if re.search(rf"\$({name}\b|{{{name}}})", value):  # PATH=/opt/bin:$PATH
                raise UsageError(f"--env {name}: no shell replaces ${name} there; type its value")
        return tuple((name, value if is_set else _from_here(name)) for name, is_set, value in pairs)

    @property
    def secrets(self) -> tuple[tuple[str, str], ...]:
        """The pairs of --secret; raises UsageError for a value on the command line."""
        for name in self.secret:
            if "=" in name:
                hint = f"a command line is no secret; type: export {name.partition('=')[0]}=..."
                raise UsageError(f"--secret takes a name only: {hint}")
        return tuple((name, _from_here(name, secret=True)) for name in self.secret)

    @property
    def time_limit_seconds(self) -> int:
        """The seconds of --time-limit, 0 without one; raises UsageError for an invalid time."""
        try:
            seconds = seconds_in(self.time_limit) if self.time_limit else 0
        except ValueError:
            seconds = -1
        if seconds < bool(self.time_limit):
            hint = "type a time such as 90m, 2h or 1d12h, of at most a century"
            raise UsageError(f"--time-limit {one_line(self.time_limit)[:40]}: {hint}")
        return seconds

    @property
    def on_event_args(self) -> tuple[str, ...]:
        """The arguments of --on-event; raises UsageError for a command that cannot run here."""
        try:
            args = tuple(shlex.split(self.on_event))
        except ValueError as error:
            raise UsageError(f"--on-event {self.on_event}: {str(error).lower()}") from None
        if args and shutil.which(args[0]) is None:
            raise UsageError(f"--on-event {args[0]}: no such program here; type its path")
        return args


@dataclass(frozen=True)
class SweepOptions(Options):
    """Several runs."""

    sweep: Annotated[tuple[str, ...], Values("NAME=VALUES")] = ()
    """Start a run for each value: lr=0.1,0.3; if repeated, for each combination of values."""


@dataclass(frozen=True)
class RankOptions(Options):
    """Interpreter, container and checks."""

    python: Annotated[str, Values("PATH")] = ""
    """Python of the ranks (default: .venv/bin/python in the workdir, else python3)."""
    image: Annotated[str, Values("IMAGE")] = ""
    """Run the ranks in containers of this image, which must have Python and torch."""
    volume: Annotated[tuple[str, ...], Values("FOLDER")] = ()
    """Folder to mount into containers: /data, /data:/there or /data:/there:ro; repeatable."""
    ignore_check: Annotated[tuple[str, ...], Values("CHECK")] = ()
    """Name of a preflight check that may fail, such as driver; repeatable."""

    def __post_init__(self) -> None:
        super().__post_init__()
        container_of(self.image, self.volume)  # refuses one that docker could not start


@dataclass(frozen=True)
class LocalOptions(RankOptions, SweepOptions):
    """Ranks on this machine."""

    nproc: Ranks = 0
    """Ranks to start (also: --nproc-per-node); 0: one per GPU, or a single one without GPUs."""


@dataclass(frozen=True)
class HostOptions(RankOptions):
    """Start and restarts."""

    workdir: Annotated[str, Values("FOLDER")] = ""
    """Folder of the code on the hosts (default: the path of the current folder)."""
    port: Annotated[int, Between(0, LAST_PORT)] = 0
    """Port of the rendezvous (MASTER_PORT); 0: a free one on the first host."""
    wait: bool = False
    """Wait until busy hosts are free, instead of refusing to start."""
    max_restarts: Count = 0
    """Number of restarts after failures; a task resumes from its newest checkpoint."""
    spares: Count = 0
    """Keep this many hosts, the last of the file, in reserve to replace lost ones."""
    min_hosts: Count = 0
    """Minimum number of hosts to continue with after losses; 0: all."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("spares", "min_hosts"),
            lambda options: options.max_restarts > 0,
            "a run continues by a restart, and --max-restarts is 0",
            "--max-restarts 3",
        ),
    )


def refuse_ineffective(options: Any) -> None:
    """Raise UsageError for options that are given and change nothing, each with what to type."""
    conditions = [
        condition
        for base in type(options).__mro__
        for condition in vars(base).get("conditions", ())
    ]
    refuse_without_effect(options, changed_settings(options), conditions)


def _from_here(name: str, secret: bool = False) -> str:
    if name not in os.environ:
        option = "--secret" if secret else "--env"
        command = f"read -rs {name}; export {name}" if secret else f"--env {name}=VALUE"
        raise UsageError(f"{option} {name}: not set here; type: {command}")
    return os.environ[name]
