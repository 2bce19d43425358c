"""Ranks that take their steps apart and average their weights now and then (PostLocalSGD).

With --local-sgd-steps N gradients travel as usual for a tenth of the run; from there on each rank
takes its steps alone, and after every N of them all ranks take the average (Lin et al., 2020,
arXiv:1808.07217). N times fewer bytes: it pays where an exchange takes much longer than a step,
as on 1 GbE, and costs some accuracy, the more the larger N is.

Averaged is all that steps change: weights, the optimiser's momenta, the average of weights. So
the ranks are alike bit for bit afterwards, and they meet before anything is evaluated or saved.
For plain and Nesterov's momentum, and for the average of weights, all of which are linear, meeting
after every step is the same as exchanging gradients.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from training.config import SyncSettings
from training.ranks import Ranks
from training.state import TrainingState

WHOLE_SHARE = 0.1  # of the run's steps, in which gradients travel


class PeriodicExchange(NamedTuple):
    """An exchange that happens once in a number of steps."""

    exchange: Callable[[], None]
    steps: int


def is_local_step(config: SyncSettings, steps: int, step: int) -> bool:
    """Whether ranks take this step alone, in a run of so many steps."""
    return config.local_sgd_steps > 0 and step >= round(steps * WHOLE_SHARE)


@torch.no_grad()
def average_parameters(ranks: Ranks, state: TrainingState) -> None:
    """Give all ranks the average of what they have learnt."""
    if ranks.world == 1:
        return
    parts = learnt(state)
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat)
    flat /= ranks.world
    sizes = [part.numel() for part in parts]
    for part, average in zip(parts, torch.split(flat, sizes), strict=True):
        part.copy_(average.view(part.shape))


def learnt(state: TrainingState) -> list[torch.Tensor]:
    """Everything that a step changes, and that may differ between ranks."""
    weights = [weight for weight in state.model.parameters() if weight.requires_grad]
    momenta = [
        value
        for weight in weights
        for value in state.optimizer.state[weight].values()
        if isinstance(value, torch.Tensor) and value.shape == weight.shape
    ]
    followers = list(state.average.model.parameters()) if state.average else []
    return [*weights, *momenta, *followers]
