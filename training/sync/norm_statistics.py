"""The running statistics of batch norms, which each rank collects from its own images.

At the end of an epoch all ranks take the mean over ranks, in one exchange: evaluations, final.pt
and checkpoints have statistics of all images. A checkpoint within an epoch has the mean, too, and
beside it the statistics of each rank, with which a run on as many ranks goes on to the same bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from training.ranks import Ranks
from training.state import TrainingState


@torch.no_grad()
def share_statistics(ranks: Ranks, model: nn.Module) -> None:
    """Give all ranks the mean of their statistics, and rank 0's buffers of other kinds."""
    if ranks.world == 1:
        return
    own = _statistics(model)
    mean = torch.cat([part.flatten().double() for part in own]) if own else torch.zeros(0)
    if own:
        dist.all_reduce(mean)
        mean /= ranks.world  # of equal numbers exactly that number
    ranks.broadcast_buffers(model)
    _fill(own, mean)


def share_all_statistics(ranks: Ranks, state: TrainingState) -> None:
    """Do so with the model, and with the average of its weights."""
    for model in (state.model, state.average.model if state.average else None):
        if model:
            share_statistics(ranks, model)


def gathered_statistics(ranks: Ranks, model: nn.Module) -> torch.Tensor | None:
    """Return the statistics of each rank, (world, numbers), on the CPU; None if all are equal."""
    own = _statistics(model)
    if ranks.world == 1 or not own:
        return None
    flat = torch.cat([part.detach().flatten() for part in own]).cpu()
    parts = [torch.empty_like(flat) for _ in range(ranks.world)]
    dist.all_gather(parts, flat)
    together = torch.stack(parts)
    return None if torch.equal(together, together[:1].expand_as(together)) else together


@torch.no_grad()
def restore_statistics(ranks: Ranks, model: nn.Module, gathered: object) -> None:
    """Give this rank its own statistics back, if they were gathered from as many ranks."""
    own = _statistics(model)
    shape = ranks.world, sum(part.numel() for part in own)
    if isinstance(gathered, torch.Tensor) and gathered.shape == shape:
        _fill(own, gathered[ranks.rank])


@contextmanager
def statistics_kept(model: nn.Module) -> Iterator[None]:
    """Keep this rank's statistics, where DDP begins: it hands out the buffers of rank 0."""
    own = _statistics(model)
    before = [each.clone() for each in own]
    yield
    for each, kept in zip(own, before, strict=True):
        each.copy_(kept)


def _statistics(model: nn.Module) -> list[torch.Tensor]:
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    found = [each for norm in norms for each in (norm.running_mean, norm.running_var)]
    return [each for each in found if each is not None]


def _fill(statistics: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    parts = torch.split(flat, [each.numel() for each in statistics])
    for each, part in zip(statistics, parts, strict=True):
        each.copy_(part.view_as(each))
