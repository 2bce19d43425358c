"""The options of a launch, as dataclasses: each exists once, with its default and its unit."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.run.job import JobTemplate, Limits
from rackrun.errors import UsageError

LAST_PORT = 65535


if TYPE_CHECKING:
    from tyro.conf import Positional as Positional
else:

    class Positional:
        """Tyro's mark, for a start that asks for no types and can do without tyro's import."""

        def __class_getitem__(cls, kind: Any) -> Any:
            from tyro.conf import Positional

            return Positional[kind]


@dataclass(frozen=True)
class Serving:
    """Settings for serving shards to hosts."""

    serve: bool = False
    """Serve the folder of --data by nginx. Done by itself for hosts that are other machines."""
    no_serve: bool = False
    """Serve nothing: every host has the folder of --data itself, under the same path."""
    serve_address: str = ""
    """Address of this machine to serve at; by default the one on the way to the hosts."""
    serve_port: int = 0
    """Port to serve at; 0: a free one."""
    serve_native: bool = False
    """Serve by this machine's nginx, though there is Docker."""
    serve_image: str = ""
    """Container image of nginx; by default the official one, pinned by its digest."""

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if self.serve and self.no_serve:
            raise UsageError("--serve and --no-serve exclude each other: leave one of them out")


@dataclass(frozen=True)
class Options:
    """Options of every way to launch."""

    name: str = ""
    """Name of the run; by default what runs."""
    runs: Path = Path("runs")
    """Folder in which the run gets a folder of its own."""
    env: tuple[str, ...] = ()
    """NAME=VALUE, or NAME as it is set here, for every rank; may be given several times."""
    secret: tuple[str, ...] = ()
    """NAME as it is set here, for every rank, and written down nowhere; likewise."""
    dry_run: bool = False
    """Print what would run on each host, and start no rank. Shards that would be served are."""
    json: bool = False
    """With --dry-run: print it as JSON."""
    plain: bool = False
    """Plain lines instead of the board."""
    share: bool = False
    """Let other accounts look into the run folder, here and on hosts, as far as the umask does."""
    serving: Serving = field(default_factory=Serving)
    limits: Limits = field(default_factory=Limits)

    @property
    def environment(self) -> tuple[tuple[str, str], ...]:
        """The pairs of --env; raises UsageError for what is none."""
        pairs = (word.partition("=") for word in self.env)
        return tuple((name, value if is_set else from_here(name)) for name, is_set, value in pairs)

    @property
    def secrets(self) -> tuple[tuple[str, str], ...]:
        """The pairs of --secret; raises UsageError for a value on the command line."""
        for name in self.secret:
            if "=" in name:
                hint = f"a command line is no secret; type: export {name.partition('=')[0]}=..."
                raise UsageError(f"--secret takes a name only: {hint}")
        return tuple((name, from_here(name)) for name in self.secret)

    @property
    def jobs(self) -> JobTemplate:
        """Return the template of this launch's jobs, with variables as they are set here."""
        return JobTemplate(
            self.name, self.runs, self.environment, self.secrets, self.limits, self.share
        )


@dataclass(frozen=True)
class ScalingOptions(Options):
    """Options of the ways to launch that can do so several times."""

    scaling: str = ""
    """With TASK --synthetic: run on so many hosts (run-local: processes), one run after another,
    and show how the speed grows: 1,2,4,8. May stand behind the task."""


@dataclass(frozen=True)
class RankOptions(Options):
    """Options of the ranks' interpreter and container."""

    python: str = ""
    """Interpreter of the ranks; by default .venv/bin/python in the workdir, or python3."""
    image: str = ""
    """Run the ranks in containers of this image, which has Python and torch; see --volume."""
    volume: tuple[str, ...] = ()
    """A further folder that containers see: /data, /data:/there or /data:/there:ro."""


@dataclass(frozen=True)
class HostOptions(RankOptions):
    """Options of every run on several hosts."""

    ignore_check: tuple[str, ...] = ()
    """Name of a check that may fail, such as code; may be given several times."""
    workdir: str = ""
    """Folder with the code on the hosts; by default the current folder's path."""
    port: int = 0
    """Port of the master; 0: one that is free on the first host."""
    max_restarts: int = 0
    """Run again after a failure, so many times, a task from its newest checkpoint."""
    spares: int = 0
    """The last so many hosts wait until others are lost."""
    min_hosts: int = 0
    """Go on with so many hosts, when others are lost; 0: with as many as at the start."""

    def __post_init__(self) -> None:
        """Refuse numbers of nothing."""
        for name in ("max_restarts", "spares", "min_hosts"):
            if getattr(self, name) < 0:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} {getattr(self, name)}: must be 0 or more")
        if not 0 <= self.port <= LAST_PORT:
            raise UsageError(f"--port {self.port}: must be 0, or a port up to {LAST_PORT}")


def from_here(name: str) -> str:
    """The launcher's own variable of that name."""
    if name not in os.environ:
        raise UsageError(f"--env {name}: not set here; type: --env {name}=VALUE")
    return os.environ[name]
