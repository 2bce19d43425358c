"""The options of `./run-ssh`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.run.settings import HostOptions, Positional, ScalingOptions
from rackrun.errors import UsageError


@dataclass(frozen=True)
class SshOptions(HostOptions, ScalingOptions):
    """Options of `./run-ssh`."""

    hosts: Positional[Path] = Path("hosts.txt")
    """The host file: one host a line, in the order of the node ranks."""
    slurm: bool = False
    """No host file: the nodes of this Slurm allocation, from inside salloc or sbatch."""
    include: str = ""
    """Run on these hosts or slots only: gpu01,gpu[03-04],gpu02:0,1"""
    exclude: str = ""
    """Leave out these hosts or slots."""
    json: bool = False
    """With --check or --dry-run: print it as JSON."""
    check: bool = False
    """Look at every host, show a table, and start no rank."""
    detach: bool = False
    """Print a run id and return; the run goes on without this machine. See attach and stop."""
    sync: bool = False
    """Bring the working tree to the hosts first: what git tracks, and what it does not ignore but
    for private files."""
    sync_untracked: tuple[str, ...] = ()
    """With --sync: bring this file, too, which git does not track and which is private by its mode
    or name; a pattern will do, and it may be given several times."""
    accept_new: bool = False
    """Record the keys of hosts that are not in known_hosts; changed keys are refused still."""
    ssh_config: str = ""
    """An ssh_config file to use in place of your own and the system's."""

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        super().__post_init__()
        if self.sync_untracked and not self.sync:
            raise UsageError("--sync-untracked means nothing without --sync")
