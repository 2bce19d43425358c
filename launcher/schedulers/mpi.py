"""mpirun with one process per node: Open MPI, or a launcher that speaks PMI (MPICH, Intel).

They number the nodes but name no first one, so MASTER_ADDR has to be given.
"""

from __future__ import annotations

from launcher.schedulers.placement import Placement, Sourced, Variables
from rackrun.commands import called
from rackrun.errors import UsageError

OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")


def open_mpi(variables: Variables) -> Placement | None:
    """Return the placement of a process of Open MPI's mpirun; None elsewhere."""
    return find_placement(variables, "Open MPI", OPEN_MPI, "mpirun --map-by ppr:1:node")


def pmi(variables: Variables) -> Placement | None:
    """Return the placement of a process that PMI numbers; None elsewhere."""
    return find_placement(variables, "PMI", PMI, "mpirun -ppn 1")


def find_placement(
    variables: Variables, platform: str, names: tuple[str, str, str], one_each: str
) -> Placement | None:
    """Return the placement read from the variables for rank, size and processes on this node."""
    rank, size, local_size = names
    if rank not in variables:
        return None
    local = variables.count(local_size)
    if local is not None and local.value != 1:
        several = f"{local_size}={local.value}: node is started once per node"
        raise UsageError(f"{several}; type: {one_each} {called('node')} ...")
    return Placement(
        platform=platform,
        node=variables.number(rank),
        nodes=variables.number(size),
        master=variables.find("MASTER_ADDR") or Sourced("", "MASTER_ADDR is not set"),
        port=variables.port("MASTER_PORT"),
        processes=variables.count("NPROC_PER_NODE"),
    )
