"""Placements on platforms whose variables say it all: MPI, NGC, Kubeflow, or set by hand."""

from __future__ import annotations

import re
from dataclasses import replace

from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.launcher.schedulers.placement import Placement, Sourced, Variables
from rackrun.units import first_few

BY_HAND = ("NNODES", "NODE_RANK", "MASTER_ADDR")
UNKNOWN = re.compile(r"\w+_(NODE_?RANK|RANK|NODEID|NODE_ID|NODE_INDEX)|(FLUX|JSM|PMIX)_\w+")
"""Variables of launchers that number nodes or processes."""


def open_mpi(variables: Variables) -> Placement | None:
    """Return the placement of a process of Open MPI's mpirun; None elsewhere."""
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return _of_mpirun(variables, "Open MPI", names, "mpirun --map-by ppr:1:node")


def pmi(variables: Variables) -> Placement | None:
    """Return the placement of a process that PMI numbers (MPICH, Intel MPI); None elsewhere."""
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")
    return _of_mpirun(variables, "PMI", names, "mpirun -ppn 1")


def _of_mpirun(
    variables: Variables, platform: str, names: tuple[str, str, str], one_each: str
) -> Placement | None:
    """Return the placement by the variables for rank, size and processes on this node."""
    rank, size, local_size = names
    if rank not in variables:
        return None
    local = variables.count(local_size)
    if local is not None and local.value != 1:
        several = f"{local_size}={local.value}: node is started once per node"
        raise UsageError(f"{several}; type: {one_each} {called('node')} ...")
    return _placement(variables, platform, rank, size)  # mpirun names no first node


def ngc(variables: Variables) -> Placement | None:
    """Return the placement of a container of an array job of NGC or Base Command; None elsewhere.

    The name of the first node may resolve only minutes after the start; that node never needs it.
    """
    if "NGC_ARRAY_SIZE" not in variables:
        return None
    gpus, job = variables.count("NGC_GPUS_PER_NODE"), variables.find("NGC_JOB_ID")
    master = variables.find("NGC_MASTER_ADDR")
    if master is None and job is not None:
        master = Sourced(f"launcher-svc-{job.value}", job.origin)
    return Placement(
        platform="NGC",
        node=variables.number("NGC_ARRAY_INDEX", "NGC_REPLICA_ID", "NGC_MULTINODE_RANK"),
        nodes=variables.number("NGC_ARRAY_SIZE"),
        master=master or Sourced("", "neither NGC_MASTER_ADDR nor NGC_JOB_ID is set"),
        port=variables.port("MASTER_PORT"),
        processes=gpus,
        most_processes=gpus,
        job=job.value if job else "",
    )


def train_job(variables: Variables) -> Placement | None:
    """Return the placement of a pod of Kubeflow's TrainJob, or of a recent PyTorchJob.

    They speak torchrun's own variables.
    """
    if "PET_NNODES" not in variables:
        return None
    nodes = variables.text("PET_NNODES")
    if ":" in nodes.value:
        raise UsageError(f"PET_NNODES={nodes.value}: an elastic job; give it a number of nodes")
    return _placement(
        variables,
        "TrainJob",
        "PET_NODE_RANK",
        "PET_NNODES",
        masters=("PET_MASTER_ADDR", "MASTER_ADDR"),
        ports=("PET_MASTER_PORT", "MASTER_PORT"),
        counts=("PET_NPROC_PER_NODE",),
    )


def pytorch_job(variables: Variables) -> Placement | None:
    """Return the placement of a pod of PyTorchJob, where RANK and WORLD_SIZE count *nodes*."""
    if not {"RANK", "WORLD_SIZE"} <= variables.set.keys() or "NODE_RANK" in variables:
        return None
    if "LOCAL_RANK" in variables:  # as every rank has
        raise UsageError("RANK and LOCAL_RANK are set: node is started once per node, not per rank")
    counts = ("PET_NPROC_PER_NODE", "NPROC_PER_NODE")
    return _placement(variables, "PyTorchJob", "RANK", "WORLD_SIZE", counts=counts)


def dstack(variables: Variables) -> Placement | None:
    """Return the placement of a node of a task of dstack; None elsewhere."""
    if "DSTACK_NODE_RANK" not in variables:
        return None
    return _placement(
        variables,
        "dstack",
        "DSTACK_NODE_RANK",
        "DSTACK_NODES_NUM",
        masters=("MASTER_ADDR", "DSTACK_MASTER_NODE_IP"),
        counts=("DSTACK_GPUS_PER_NODE",),
    )


def skypilot(variables: Variables) -> Placement | None:
    """Return the placement of a node of a task of SkyPilot; None elsewhere."""
    if "SKYPILOT_NODE_RANK" not in variables:
        return None
    addresses = variables.text("SKYPILOT_NODE_IPS")  # a line for each node
    placement = _placement(
        variables,
        "SkyPilot",
        "SKYPILOT_NODE_RANK",
        "SKYPILOT_NUM_NODES",
        counts=("SKYPILOT_NUM_GPUS_PER_NODE",),
    )
    if "MASTER_ADDR" in variables:
        return placement
    first = next(iter(addresses.value.split()), "")
    return replace(placement, master=Sourced(first, addresses.origin))


def by_hand(variables: Variables) -> Placement | None:
    """Return the placement given by MASTER_ADDR, NNODES and NODE_RANK; None if none is set."""
    missing = [name for name in BY_HAND if name not in variables]
    if len(missing) == len(BY_HAND):
        return None
    if not missing:
        return _placement(variables, "environment", "NODE_RANK", "NNODES")
    if "NNODES" not in variables or variables.number("NNODES").value != 1:
        given = ", ".join(name for name in BY_HAND if name in variables)
        raise UsageError(f"{given} set, but not {', '.join(missing)}; set all three, or none")
    nodes, port = variables.number("NNODES"), variables.port("MASTER_PORT")
    return _alone(variables, "environment", nodes, port)


def unknown(variables: Variables) -> UsageError:
    """Return why no placement is found: each of several nodes would run alone, without a word."""
    seen = sorted(name for name in variables.set if UNKNOWN.fullmatch(name))
    found = f" (it may be the one of {first_few(seen, 5)})" if seen else ""
    return UsageError(
        f"node: not started by a known scheduler{found}; set NNODES, NODE_RANK and MASTER_ADDR on"
        f" every node; for this machine alone, type: {called('local')} ..."
    )


def _alone(
    variables: Variables, platform: str, nodes: Sourced[int], port: Sourced[int]
) -> Placement:
    return Placement(
        platform,
        node=Sourced(0, "a single node"),
        nodes=nodes,
        master=variables.find("MASTER_ADDR") or Sourced("", "not needed"),
        port=port,
        processes=variables.count("NPROC_PER_NODE"),
    )


def _placement(
    variables: Variables,
    platform: str,
    node: str,
    nodes: str,
    masters: tuple[str, ...] = ("MASTER_ADDR",),
    ports: tuple[str, ...] = ("MASTER_PORT",),
    counts: tuple[str, ...] = ("NPROC_PER_NODE",),
) -> Placement:
    """Return the placement in these variables; of several names, the first that is set counts."""
    return Placement(
        platform,
        node=variables.number(node),
        nodes=variables.number(nodes),
        master=variables.find(*masters) or Sourced("", f"{masters[0]} is not set"),
        port=variables.port(*ports),
        processes=variables.count(*counts),
    )
