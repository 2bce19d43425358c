"""Placement without a known scheduler: variables that were set by hand, or a single node."""

from __future__ import annotations

from launcher.schedulers.placement import Placement, Sourced, Variables
from rackrun.errors import UsageError

NEEDED = ("NNODES", "NODE_RANK", "MASTER_ADDR")


def by_hand(variables: Variables) -> Placement | None:
    """Return the placement given by MASTER_ADDR, NNODES and NODE_RANK; None if none is set."""
    missing = [name for name in NEEDED if name not in variables]
    if len(missing) == len(NEEDED):
        return None
    alone = "NNODES" in variables and variables.number("NNODES").value == 1
    if missing and not alone:
        given = ", ".join(name for name in NEEDED if name in variables)
        raise UsageError(f"{given} set, but not {', '.join(missing)}; set all three, or none")
    return Placement(
        platform="environment",
        node=variables.number("NODE_RANK") if not missing else Sourced(0, "a single node"),
        nodes=variables.number("NNODES"),
        master=variables.find("MASTER_ADDR") or Sourced("", "not needed"),
        port=variables.port("MASTER_PORT"),
        processes=variables.count("NPROC_PER_NODE"),
    )


def alone(variables: Variables) -> Placement:
    """Return the placement of a single node."""
    return Placement(
        platform="none",
        node=Sourced(0, "a single node"),
        nodes=Sourced(1, "no scheduler found"),
        master=Sourced("", "not needed"),
        port=variables.port(),
        processes=variables.count("NPROC_PER_NODE"),
    )
