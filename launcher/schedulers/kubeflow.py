"""Kubeflow on Kubernetes: TrainJob speaks torchrun's own variables, PyTorchJob those of a rank.

In a PyTorchJob RANK is the rank of the *node* and WORLD_SIZE the number of nodes.
"""

from __future__ import annotations

from launcher.schedulers.placement import Placement, Sourced, Variables
from rackrun.errors import UsageError


def find_placement(variables: Variables) -> Placement | None:
    """Return the placement of this pod; None outside Kubeflow."""
    if "PET_NNODES" in variables:
        return _train_job(variables)
    if {"RANK", "WORLD_SIZE"} <= variables.set.keys() and "NODE_RANK" not in variables:
        return _pytorch_job(variables)
    return None


def _train_job(variables: Variables) -> Placement:
    """Read the variables of TrainJob, which a recent PyTorchJob sets as well."""
    nodes = variables.text("PET_NNODES")
    if ":" in nodes.value:
        raise UsageError(f"PET_NNODES={nodes.value}: an elastic job; give it a number of nodes")
    return Placement(
        platform="TrainJob",
        node=variables.number("PET_NODE_RANK"),
        nodes=variables.number("PET_NNODES"),
        master=variables.find("PET_MASTER_ADDR", "MASTER_ADDR")
        or Sourced("", "PET_MASTER_ADDR is not set"),
        port=variables.port("PET_MASTER_PORT", "MASTER_PORT"),
        processes=variables.count("PET_NPROC_PER_NODE"),
    )


def _pytorch_job(variables: Variables) -> Placement:
    """Read the variables of PyTorchJob; UsageError in a rank, which has LOCAL_RANK as well."""
    if "LOCAL_RANK" in variables:
        raise UsageError("RANK and LOCAL_RANK are set: node is started once per node, not per rank")
    return Placement(
        platform="PyTorchJob",
        node=variables.number("RANK"),
        nodes=variables.number("WORLD_SIZE"),
        master=variables.find("MASTER_ADDR") or Sourced("", "MASTER_ADDR is not set"),
        port=variables.port("MASTER_PORT"),
        processes=variables.count("PET_NPROC_PER_NODE", "NPROC_PER_NODE"),
    )
