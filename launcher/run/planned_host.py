"""What a plan needs to know of a host."""

from __future__ import annotations

from dataclasses import dataclass

Environment = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class PlannedHost:
    """Facts about a host that the plan needs; `local` or the preflight finds them."""

    name: str
    """As the user wrote it."""
    address: str
    """The address at which the other hosts reach it."""
    processes: int
    """Ranks to start: one per GPU, or `slots` of hosts.txt."""
    python: str
    """The interpreter that has torch, an absolute path."""
    workdir: str
    """Where the ranks start, an absolute path: the code on that host."""
    folder: str
    """The run folder on that host, an absolute path; the agent makes it if it is not there."""
    cores: int = 1
    """CPU cores that the ranks share."""
    interface: str = ""
    """The network device towards the master; empty: the libraries choose."""
    env: Environment = ()
    """Set on this host only."""
    setup: tuple[str, ...] = ()
    """What goes before the command line of torchrun: a shell that sets its environment."""
    agent_python: str = "python3"
    """What starts the agent there: any Python from 3.8 on."""
    container: tuple[str, ...] = ()
    """What goes before the agent's own command line, so that it runs in a container."""
    locks: tuple[tuple[str, bool], ...] = ()
    """Files that the agent locks, so that no other run uses the host; True: others may share it."""
    gpus: bool = False
    """The ranks were counted by the GPUs here, and are to use them."""
    gpu_model: str = ""
    """The model of the GPUs that its ranks use; empty: none, or not known."""
    signalled_together: bool = False
    """The scheduler sends signals to every process of this host, not to the launcher alone.

    So agent, torchrun and shims leave signals to the launcher, which gets them too; ranks ignore
    all but SIGTERM, which the launcher sends them.
    """
