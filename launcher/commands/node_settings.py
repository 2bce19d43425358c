"""The options of `python -m launcher node`."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.run.settings import Options
from rackrun.errors import UsageError
from rackrun.help.page import Head

HEAD = Head(
    "{prog} [options] TASK [task options] | -- COMMAND",
    "Train on this node of a run, started once per node by Slurm, NGC, Kubernetes or mpirun, or by"
    " hand with MASTER_ADDR, NNODES and NODE_RANK.",
    (
        ("srun {prog} catdog --data data/shards", "a task, on every node of a job"),
        ("{prog} --dry-run -- python train.py", "print what was found and would run"),
    ),
    "{prog} TASK --help shows the options of a task.",
)
"""The head of the help."""


@dataclass(frozen=True)
class NodeOptions(Options):
    """This node, and how all nodes meet."""

    nproc: int = 0
    """Ranks on this node (also: --nproc-per-node); 0: the scheduler's number, or one per GPU."""
    slots: str = ""
    """Processes of every node, such as 2,1,4; a run with other numbers is refused."""
    master: str = ""
    """Name or address of node 0, instead of the scheduler's."""
    port: int = 0
    """Free port of node 0; 0: the scheduler's, or 29500; a free one for a single node."""
    wait_seconds: float = 600.0
    """Seconds to wait until node 0 resolves and answers, and until all nodes have joined."""
    auto_resume: bool = False
    """Resume from the newest checkpoint of earlier runs of this --name, if there is one."""
    ignore_check: tuple[str, ...] = ()
    """public: allow a rendezvous at a public address of node 0."""

    def __post_init__(self) -> None:
        """Refuse what is no check."""
        super().__post_init__()
        for name in self.ignore_check:
            if name != "public":
                raise UsageError(f"--ignore-check {name}: no such check; there is: public")
