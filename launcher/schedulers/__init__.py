"""The scheduler that started this process, and its node rank; pure, from the environment.

Another platform is a function in `platforms`, and an entry in `PLATFORMS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rackrun.contract.variables import RUN_ID
from rackrun.errors import UsageError
from rackrun.launcher.schedulers import platforms, slurm
from rackrun.launcher.schedulers.placement import Placement, Sourced, Variables

__all__ = ["PLATFORMS", "Sourced", "Placement", "find_placement"]

PLATFORMS: tuple[Callable[[Variables], Placement | None], ...] = (
    platforms.open_mpi,  # mpirun inside Slurm starts its daemons by srun: trust its own variables
    slurm.find_placement,  # before PMI, which srun may speak as well
    platforms.ngc,
    platforms.pmi,
    platforms.train_job,
    platforms.dstack,
    platforms.skypilot,
    platforms.pytorch_job,
    platforms.by_hand,
)
"""Tried in this order; the first that recognizes the environment gives the placement."""


def find_placement(environment: Mapping[str, str]) -> Placement:
    """Return the placement of this process; raise UsageError where it is unclear."""
    variables = Variables(environment)
    for name in ("TORCHELASTIC_RUN_ID", RUN_ID):
        if name in variables:
            started = f"{name} is set: this is a rank already"
            raise UsageError(f"{started}; start node outside of torchrun, or the task itself in it")
    placements = (platform(variables) for platform in PLATFORMS)
    placement = next(filter(None, placements), None)
    if placement is None:
        raise platforms.unknown(variables)
    return placement
