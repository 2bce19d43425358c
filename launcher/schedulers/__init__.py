"""The scheduler that started this process, and its node rank; pure, from the environment.

Another platform is a function in `platforms`, and an entry in `PLATFORMS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rackrun.commands import called
from rackrun.contract.variables import RUN_ID
from rackrun.errors import UsageError
from rackrun.launcher.schedulers import platforms, slurm
from rackrun.launcher.schedulers.placement import Placement, Sourced, Variables
from rackrun.shapes import LARGEST_NUMBER
from rackrun.units import whole_number

__all__ = ["PLATFORMS", "Sourced", "Placement", "find_placement", "refuse_one_of_many"]

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


SIZES = (
    *("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "NGC_ARRAY_SIZE", "PET_NNODES"),
    *("DSTACK_NODES_NUM", "SKYPILOT_NUM_NODES", "NNODES", "WORLD_SIZE"),
)
"""Variables in which schedulers and other launchers say how many processes they have started."""


def refuse_one_of_many(environment: Mapping[str, str]) -> None:
    """Raise UsageError where this launch of one machine is started several times at once.

    Each would train alone, without a word.
    """
    variables = Variables(environment)
    _refuse_in_rank(variables)
    for size in filter(None, map(variables.find, SIZES)):
        if (whole_number(size.value, LARGEST_NUMBER) or 0) > 1:
            raise UsageError(
                f"{size.origin}={size.value}: each of them would run alone; for one run on all"
                f" nodes, type: {called('node')} ...; if that is meant, type before the command:"
                f" env -u {size.origin}"
            )


def _refuse_in_rank(variables: Variables) -> None:
    for name in ("TORCHELASTIC_RUN_ID", RUN_ID):
        if name in variables:
            raise UsageError(
                f"{name} is set: this is a rank already; launch outside of torchrun, or start the"
                " task itself in it"
            )


def find_placement(environment: Mapping[str, str]) -> Placement:
    """Return the placement of this process; raise UsageError where it is unclear."""
    variables = Variables(environment)
    _refuse_in_rank(variables)
    placements = (platform(variables) for platform in PLATFORMS)
    placement = next(filter(None, placements), None)
    if placement is None:
        raise platforms.unknown(variables)
    return placement
