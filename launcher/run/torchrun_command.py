"""The command line of torchrun on a host, and the variables of its ranks. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from rackrun.contract import variables
from rackrun.errors import UsageError
from rackrun.launcher.run.job import START_SECONDS, Job
from rackrun.launcher.run.planned_host import Environment, PlannedHost

OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = "from torch.distributed.run import main; main()"


def torchrun(
    job: Job, hosts: Sequence[PlannedHost], node: int, port: int, scratch: str
) -> tuple[str, ...]:
    """Return the command line of torchrun on a host."""
    host, limits = hosts[node], job.options.limits
    shim = f"{scratch}/agent.zip"
    # Longer than the launcher takes to name a host that is missing.
    timeout_seconds = START_SECONDS + 2 * limits.rendezvous_seconds
    return (
        *host.setup,
        *(host.python, "-c", TORCHRUN),
        f"--nnodes={len(hosts)}",
        f"--node-rank={node}",
        f"--nproc-per-node={host.processes}",
        f"--master-addr={hosts[0].address}",
        f"--master-port={port}",
        f"--rdzv-id={job.run_id}",
        "--rdzv-backend=static",  # c10d compares hosts' clocks, and can start a world of one
        f"--rdzv-conf=timeout={timeout_seconds:.0f}",
        "--max-restarts=0",
        f"--log-dir={scratch}",
        "--no-python",
        # The shim starts the ranks' command, in which torchrun would replace `$$` and the like.
        *(host.python, "-I", "-S", "-X", "utf8", shim),
    )


def environment(job: Job, host: PlannedHost, world_size: int, scratch: str) -> Environment:
    """Return the environment of ranks; the host's overrides the user's, the launcher's both."""
    ours: Environment = (
        (variables.RUN_ID, job.run_id),
        (variables.WORLD_SIZE, str(world_size)),
        (variables.RUN_FOLDER, host.folder),
        (variables.RUN_NAME, job.name),
        (variables.REPORTS, f"{scratch}/reports"),
    )
    ours += ((variables.GPUS, "1"),) if host.gpus else ()
    ours += ((variables.COMMIT, job.commit),) if job.commit else ()
    return tuple(dict((*job.options.environment, *host.env, *ours)).items())


def defaults(host: PlannedHost) -> Environment:
    """Return variables for ranks that the host may override.

    torchrun would give each of several ranks a single thread, whatever the number of cores. A
    traceback at a fatal signal names the line of a crash, and of a hang that is ended by SIGABRT.
    """
    threads = max(1, host.cores // host.processes)
    network = (
        (("GLOO_SOCKET_IFNAME", host.interface), ("NCCL_SOCKET_IFNAME", f"={host.interface}"))
        if host.interface
        else ()
    )
    return (
        ("OMP_NUM_THREADS", str(threads)),
        ("PYTHONUNBUFFERED", "1"),
        ("PYTHONFAULTHANDLER", "1"),
        *network,
    )


def check_environment(pairs: Environment) -> None:
    """Raise UsageError for variables that cannot be set, or that torchrun sets itself."""
    for name, value in pairs:
        # The kernel cannot carry these.
        if not name or "=" in name or "\0" in name + value:
            raise UsageError(f"not a variable that can be set: {name!r}; type: NAME=VALUE")
        if name in OF_TORCHRUN:
            hint = "for the port type: --port" if name == "MASTER_PORT" else "leave it out"
            raise UsageError(f"{name}={value}: torchrun sets {name} for each rank; {hint}")
