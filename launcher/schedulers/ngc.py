"""NGC and Base Command: an array job has a container per node, and a name for the first of them.

That name may resolve only minutes after the start; the first node never needs it.
"""

from __future__ import annotations

from launcher.schedulers.placement import Placement, Sourced, Variables


def find_placement(variables: Variables) -> Placement | None:
    """Return the placement of this container; None outside NGC."""
    if "NGC_ARRAY_SIZE" not in variables:
        return None
    nodes = variables.number("NGC_ARRAY_SIZE")
    gpus = variables.count("NGC_GPUS_PER_NODE")
    job = variables.find("NGC_JOB_ID")
    return Placement(
        platform="NGC",
        node=variables.number("NGC_ARRAY_INDEX", "NGC_REPLICA_ID", "NGC_MULTINODE_RANK"),
        nodes=nodes,
        master=master(variables),
        port=variables.port("MASTER_PORT"),
        processes=gpus,
        most_processes=gpus,
        job=job.value if job else "",
    )


def master(variables: Variables) -> Sourced[str]:
    """Return the name of the first node."""
    given = variables.find("NGC_MASTER_ADDR")
    job = variables.find("NGC_JOB_ID")
    if given or job is None:
        return given or Sourced("", "neither NGC_MASTER_ADDR nor NGC_JOB_ID is set")
    return Sourced(f"launcher-svc-{job.value}", job.origin)
