"""Local SGD: ranks step on their own and average their weights now and then (PostLocalSGD).

With --local-sgd-steps N gradients are exchanged as usual for a tenth of the run; from there on each
rank steps on its own, and after every N steps all ranks take the average (Lin et al., 2020,
arXiv:1808.07217). With momenta and averages, an exchange has two to four times the bytes of one of
gradients, so that all of them have N/2 (sgd), N/3 (adamw, or sgd with EMA) or N/4 (adamw with EMA)
times fewer. It pays where an exchange takes much longer than a step, as on 1 GbE, and costs some
accuracy, the more the larger N is.

All that steps change is averaged: weights, the optimizer's momenta, the EMA of the weights. So
the ranks are equal bit for bit afterwards, and they average before anything is evaluated or
saved. For plain and Nesterov's momentum and for the EMA, all of which are linear, averaging after
every step is the same as exchanging gradients.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from training.ranks import Ranks
from training.settings.ranks import SyncSettings
from training.state import TrainingState

WHOLE_SHARE = 0.1  # of the run's steps, in which gradients travel


class PeriodicExchange(NamedTuple):
    """An exchange that happens once in a number of steps."""

    exchange: Callable[[], None]
    steps: int


def is_local_step(config: SyncSettings, steps: int, step: int) -> bool:
    """Return whether ranks take this step on their own, in a run of this many steps."""
    return config.local_sgd_steps > 0 and step >= round(steps * WHOLE_SHARE)


@torch.no_grad()
def average_parameters(ranks: Ranks, state: TrainingState) -> None:
    """Give all ranks the average of what they have learned."""
    if ranks.world == 1:
        return
    parts = _learned(state)
    # One exchange, not one for each tensor: on a slow network each costs a round trip.
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat)
    flat /= ranks.world
    sizes = [part.numel() for part in parts]
    for part, average in zip(parts, torch.split(flat, sizes), strict=True):
        part.copy_(average.view(part.shape))


def _learned(state: TrainingState) -> list[torch.Tensor]:
    """Return everything that a step changes and that may differ between ranks."""
    weights = [weight for weight in state.model.parameters() if weight.requires_grad]
    momenta = [
        value
        for weight in weights
        for value in state.optimizer.state[weight].values()
        if isinstance(value, torch.Tensor) and value.shape == weight.shape  # not counts of steps
    ]
    followers = list(state.average.model.parameters()) if state.average else []
    return [*weights, *momenta, *followers]
