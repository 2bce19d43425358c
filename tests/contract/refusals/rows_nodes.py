"""Refusals of `node`, which a scheduler starts on each node, and of `--slurm`."""

from tests.lab.refusal import Refusal
from tests.lab.scheduler import recorded

LONG = "a" * 64
"""More than a part of a host name may have."""


def node(environment: str, *names: str, options: str = "", **changes: str) -> Refusal:
    """Return a node that is started in a recorded environment, with some other variables."""
    env = {**recorded(environment), **changes}
    return Refusal(f"./run-local node {options} catdog --synthetic", 64, names, env=env)


def allocation(environment: str, variable: str, value: str, *names: str) -> Refusal:
    """Return a launch on an allocation of Slurm's, with another value of a variable."""
    env = {**recorded(environment), variable: value}
    return Refusal("./run-ssh --slurm -- true", 64, (variable, *names), env=env)


# fmt: off
ROWS = [
    # Which node of how many this is, and where the first one is.
    node("none", "NNODES, NODE_RANK and MASTER_ADDR", "./run-local"),
    node("flux", "FLUX_TASK_RANK", "NNODES, NODE_RANK and MASTER_ADDR"),
    node("none", "JSM_NAMESPACE_RANK", "NNODES, NODE_RANK and MASTER_ADDR", JSM_NAMESPACE_RANK="1"),
    node("none", "dstack", DSTACK_NODE_RANK="1", DSTACK_NODES_NUM="2"),
    node("none", "SKYPILOT_NODE_IPS", SKYPILOT_NODE_RANK="1", SKYPILOT_NUM_NODES="2"),
    node("none", "PMIX_RANK", PMIX_RANK="1"),
    node("by-hand-no-master", "MASTER_ADDR"),
    node("by-hand-rank-3", "NODE_RANK=3", "NNODES=3"),
    node("by-hand", "MASTER_ADDR", f"{LONG[:59]}", MASTER_ADDR=f"{LONG}.example"),
    node("by-hand", "MASTER_ADDR", MASTER_ADDR="\x1b[31m"),
    node("by-hand", "--port=70000", options="--port 70000"),
    node("ngc-no-master", "MASTER_ADDR", "--master ADDRESS"),
    node("openmpi-no-master", "MASTER_ADDR", "--master ADDRESS"),
    node("trainjob-elastic", "PET_NNODES=1:4"),
    # Once per node, and not per rank.
    node("torchrun", "TORCHELASTIC_RUN_ID"),
    node("openmpi-several", "OMPI_COMM_WORLD_LOCAL_SIZE=3", "--map-by ppr:1:node ./run-local node"),
    node("slurm-several-tasks", "SLURM_STEP_TASKS_PER_NODE=2(x3)", "srun --ntasks=$SLURM_JOB_NUM_"),
    node("slurm-uneven-tasks", "SLURM_STEP_TASKS_PER_NODE=4,2,1", "srun --ntasks=$SLURM_JOB_NUM_"),
    node("slurm-salloc", "srun --ntasks=$SLURM_JOB_NUM_NODES", "./run-ssh --slurm"),
    node("slurm-batch", "srun --ntasks=$SLURM_JOB_NUM_NODES", "./run-ssh --slurm"),
    node("slurm-het-batch", "srun --ntasks=$SLURM_JOB_NUM_NODES", "./run-ssh --slurm"),
    node("slurm-step-2", "SLURM_NODEID=2", "this is elsewhere", SLURMD_NODENAME="elsewhere"),
    # How many processes each node starts.
    node("slurm-step-gpus", "--nproc 5", "SLURM_GPUS_ON_NODE=4", options="--nproc 5"),
    node("ngc-3", "--nproc 9", "NGC_GPUS_PER_NODE=8", options="--nproc 9"),
    node("by-hand", "--nproc -1", options="--nproc -1"),
    # Variables of Slurm's that cannot be.
    # An allocation, reached by SSH.
    Refusal("./run-ssh --slurm -- true", 64, ("--slurm", "salloc")),
    *(
        allocation("slurm-salloc", "SLURM_JOB_NODELIST", nodes, names)
        for nodes, names in (
            ("a[1", "bracket"),
            ("a[9-1]", "a range is written"),
            ("-oProxyCommand=x", "-oProxyCommand=x"),
            ("-a", "dash"),
            ("\x1b[31m", "not a list"),
            ("n1,n1", "n1"),
        )
    ),
    Refusal("./run-ssh --slurm -- true", 64, "SLURM_JOB_NODELIST_HET_GROUP_0",
            env={**recorded("slurm-salloc"), "SLURM_HET_SIZE": f"8{'0' * 12}"}),
    *(
        allocation("slurm-uneven-tasks", "SLURM_TASKS_PER_NODE", tasks, *names)
        for tasks, *names in (
            ("4", "1 nodes", "3"),
        )
    ),
]
