"""The options of `./run-ssh` and `rackrun node`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from rackrun.commandline.conditions import Condition, changed_settings, refuse_without_effect
from rackrun.commandline.help_page import Head
from rackrun.commandline.options import Positional, Values
from rackrun.commandline.ranges import Count, Seconds
from rackrun.errors import UsageError
from rackrun.launcher.preflight.checks import OF_MACHINE
from rackrun.launcher.run.settings import (
    SERVER,
    HostOptions,
    Options,
    Ranks,
    ReachOptions,
    SweepOptions,
)

SSH_HEAD = Head(
    "{prog} [options] HOSTS [TASK [task options] | -- COMMAND]",
    "Run a task or a command on hosts over SSH: check all hosts, then start torchrun on each."
    " Without either, train the demo on images that are drawn on this machine.",
    (
        ("{prog} hosts.txt", "the demo, on every host"),
        ("{prog} --check hosts.txt", "check the hosts only"),
        ("{prog} hosts.txt catdog --data data/shards", "a task"),
        ("{prog} --sync hosts.txt -- python train.py", "copy and run a script"),
        ("{prog} --detach hosts.txt catdog --data ...", "in the background"),
        ("{prog} -H gpu[01-04]:8 -- python train.py", "hosts without a file"),
        ("{prog} attach|logs|status|stop RUN", "manage a run"),
        ("{prog} ps", "list the runs"),
    ),
    "{prog} HOSTS TASK --help shows the options of a task.",
)
"""The head of the help."""

CHECK_HEAD = Head(
    "{prog} [options] HOSTS [TASK [task options]]",
    "Check the hosts of a file, print a table, and start no ranks. With a task, also check that"
    " every host can read its data.",
    (
        ("{prog} hosts.txt", "check every host"),
        ("{prog} hosts.txt catdog --data data/shards", "and the data of a task"),
        ("{prog} --deep hosts.txt", "and measure links, GPUs"),
        ("{prog} --json hosts.txt", "the table as JSON"),
        ("{prog} -H gpu[01-04]", "hosts without a file"),
    ),
    "{prog} HOSTS TASK --help shows the options of a task.",
    left_out="check sweep sweep_hosts gpus_needed gpu gpu_memory detach detach_seconds name dry_run"
    " plain time_limit on_event share wait max_restarts spares min_hosts hang_seconds"
    " checkpoint_seconds silent_minutes",
)
"""The head of the help of --check, without options of runs."""


@dataclass(frozen=True)
class HostChoice:
    """Hosts."""

    hosts: Positional[Path] = Path("hosts.txt")
    """Host file: one host per line, in node rank order."""
    host_list: Annotated[str, Values("HOSTS")] = ""
    """Hosts instead of a host file, with processes per host (also: -H): gpu01,gpu[02-04]:8"""
    slurm: bool = False
    """Use the nodes of this Slurm allocation (inside salloc or sbatch) instead of a host file."""
    include: Annotated[str, Values("HOSTS")] = ""
    """Use only these hosts or slots: gpu01,gpu[03-04],gpu02:0,1"""
    exclude: Annotated[str, Values("HOSTS")] = ""
    """Exclude these hosts or slots."""
    hosts_needed: Count = 0
    """Number of hosts to use: the first of the file that are free and pass the checks; 0: all."""
    gpus_needed: Count = 0
    """Number of GPUs to use: any free ones, whole hosts first; 0: all GPUs of the hosts."""
    gpu: Annotated[str, Values("MODEL")] = ""
    """With --gpus-needed: part of the GPU model's name, such as a100 or "h100 nvl"."""
    gpu_memory: Count = 0
    """With --gpus-needed: minimum memory of each GPU, in GB."""
    sweep_hosts: Count = 0
    """Hosts per run of --sweep, so that several run side by side; 0: all hosts."""


@dataclass(frozen=True)
class CheckOptions:
    """Checks of hosts."""

    check: bool = False
    """Check every host, print a table, and start no ranks."""
    deep: bool = False
    """With --check: also measure links, GPUs and disks in a short run, and name slow ones."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(("deep",), lambda options: options.check, "only --check measures", "--check"),
        Condition(
            ("dry_run",), lambda options: not options.check, "--check starts no ranks either"
        ),
    )


@dataclass(frozen=True)
class SyncOptions:
    """Code and environment of the hosts."""

    sync: bool = False
    """Copy the working tree to the hosts first, without ignored and private files."""
    sync_untracked: Annotated[tuple[str, ...], Values("FILE")] = ()
    """With --sync: also copy this untracked private file (or pattern)."""
    sync_wheels: Annotated[str, Values("FOLDER")] = ""
    """With --sync: install from the wheels in this folder, on hosts without a package index."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("sync_untracked", "sync_wheels"),
            lambda options: options.sync,
            "nothing is copied to the hosts",
            "--sync",
        ),
    )


@dataclass(frozen=True)
class DetachOptions:
    """Detached runs."""

    detach: bool = False
    """Print a run ID and return after the first step of every rank; the run continues."""
    detach_seconds: Seconds = 10.0
    """With --detach: seconds that your own command must run before the launcher returns."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("detach_seconds",),
            lambda options: options.detach,
            "a launch without --detach returns at the end of the run",
            "--detach",
        ),
    )


@dataclass(frozen=True)
class SshOptions(
    HostOptions, SweepOptions, DetachOptions, SyncOptions, CheckOptions, ReachOptions, HostChoice
):
    """Options of `./run-ssh`."""

    json: bool = False
    """With --check or --dry-run: print the result as JSON."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("sweep_hosts",),
            lambda options: bool(options.sweep),
            "a single run uses all hosts",
            "--sweep lr=0.1,0.3, or --hosts-needed {config.sweep_hosts}",
        ),
        Condition(
            ("gpus_needed",),
            lambda options: not (options.hosts_needed or options.spares or options.check),
            "--hosts-needed and --spares count whole hosts, and --check takes none",
        ),
        Condition(
            ("gpu", "gpu_memory"),
            lambda options: bool(options.gpus_needed),
            "hosts are taken with whatever GPUs they have",
            "--gpus-needed with the number of GPUs",
        ),
        Condition(
            ("json",),
            lambda options: not options.deep,
            "--deep ends with a run",
        ),
    )

    def __post_init__(self) -> None:
        """Refuse what contradicts itself, and options without effect."""
        super().__post_init__()
        if self.host_list and self.slurm:
            raise UsageError("-H and --slurm exclude each other: leave one of them out")


NODE_HEAD = Head(
    "{prog} [options] TASK [task options] | -- COMMAND",
    "Run a task or a command on this node of a scheduler's job. Start this once per node: with"
    " Slurm, NGC, Kubernetes or mpirun, or by hand with MASTER_ADDR, NNODES and NODE_RANK set.",
    (
        ("srun {prog} catdog --data data/shards", "a task, on every node of a job"),
        ("{prog} --dry-run -- python train.py", "print what was detected and would run"),
    ),
    "{prog} TASK --help shows the options of a task.",
)
"""The head of the help."""


NODE_CHECKS = ("public", "command", "code", "versions", *OF_MACHINE)


@dataclass(frozen=True)
class NodeOptions(Options):
    """This node and the rendezvous."""

    nproc: Ranks = 0
    """Ranks on this node (also: --nproc-per-node); 0: the scheduler's number, or one per GPU."""
    master: Annotated[str, Values("HOST")] = ""
    """Name or address of node 0, instead of the scheduler's."""
    port: int = 0
    """Free port on node 0; 0: the scheduler's, or 29500; any free one for a single node."""
    wait_seconds: Seconds = 600.0
    """Seconds to wait until node 0 resolves and answers, and until all nodes have joined."""
    auto_resume: bool = False
    """Resume from the newest checkpoint of earlier runs of this --name, if there is one."""
    ignore_check: Annotated[tuple[str, ...], Values("CHECK")] = ()
    """public (address of node 0), command, code, versions, or a check such as driver."""

    serving_conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(SERVER, lambda serving: serving.serve, "a node serves with --serve", "--serve"),
        Condition(("no_serve",), lambda serving: False, "a node serves nothing without --serve"),
    )

    def __post_init__(self) -> None:
        """Refuse an unknown check, and options without effect."""
        super().__post_init__()
        given = changed_settings(self.serving)
        refuse_without_effect(self.serving, given, self.serving_conditions)
        for name in self.ignore_check:
            if name not in NODE_CHECKS:
                known = ", ".join(NODE_CHECKS)
                raise UsageError(f"--ignore-check {name}: no such check; there are: {known}")
