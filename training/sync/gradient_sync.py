"""Synchronization of the ranks' weights, chosen once from the settings.

    gradients      DDP averages them during backward
    accumulation   only the last part of a batch exchanges them (--grad-accum-steps)
    fewer bytes    gradients travel as bfloat16 (--grad-compression)
    uneven inputs  a rank, or a part of its batch, may have a single image, or none

The loop marks where a step and its parts begin; it need not know which of these is at work. What
ranks exchange is the same on all of them, bit for bit, and so are their weights afterwards.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rackrun.training.config import Config
from rackrun.training.ranks import Ranks, without_exchange
from rackrun.training.settings.ranks import SyncSettings
from rackrun.training.state import TrainingState
from rackrun.training.sync.uneven_inputs import UnevenInputs, has_own_norms, norms_of_one_image


class GradientSync:
    """Makes every step of this rank a step of all ranks."""

    def __init__(self, config: Config, ranks: Ranks, state: TrainingState) -> None:
        self.model = ranks.ddp(state.model)
        """What a step calls: the state's model, under DDP where there are other ranks."""
        self._ranks = ranks
        self._state = state
        self._compiled = config.compile
        self._uneven: UnevenInputs | None = None
        if ranks.world > 1:
            register_comm_hook(self.model, config)
            is_plain = config.grad_compression == "float32"
            obstacle = "" if is_plain else "gradients travel in another form"
            self._uneven = UnevenInputs(ranks, self.model, state, obstacle)

    def remark(self, last_samples: int) -> str:
        """Return a line about a last step with this many samples; empty if it is as any other."""
        return self._uneven.remark(last_samples) if self._uneven else ""

    def step(self, samples: int, fewest: int) -> AbstractContextManager[None]:
        """Run a step of that many samples over all ranks, `fewest` in a part, in this context."""
        if not self._uneven:
            return nullcontext()
        # Before Join, inside of which any other exchange hangs. The plan tells all ranks the same
        # `fewest`, so all take part.
        if fewest <= 1 and has_own_norms(self._state.model):
            self._ranks.share_statistics(self._state.model)
        return self._uneven.at(samples)

    def has_work(self, planned: int) -> bool:
        """Return whether this rank, for which that many samples are planned, computes the step."""
        return not self._uneven or self._uneven.computes(planned)

    @contextmanager
    def part(self, images: int, is_last: bool) -> Iterator[None]:
        """Run forward and backward of a part of a batch; only the last part exchanges gradients."""
        # DDP must be left out during forward already: that is where it prepares its exchange.
        with (
            nullcontext() if is_last else without_exchange(self.model),
            norms_of_one_image(self._state.model, self._compiled) if images == 1 else nullcontext(),
        ):
            yield


def register_comm_hook(model: nn.Module, config: SyncSettings) -> None:
    """Have a model's gradients exchanged as bfloat16 if the settings ask for it.

    That is half the bytes of float32; sums lose about two digits.
    """
    if isinstance(model, DistributedDataParallel) and config.grad_compression == "bfloat16":
        model.register_comm_hook(None, _in_bfloat16)


def _in_bfloat16(
    state: Any,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP looks at this annotation
) -> torch.futures.Future[torch.Tensor]:
    whole = bucket.buffer()
    # Divided before the sum: DDP expects a mean, and takes what the hook leaves as it is.
    short = whole.to(torch.bfloat16).div_(dist.get_world_size())
    exchange = dist.all_reduce(short, async_op=True)
    assert exchange is not None
    future: torch.futures.Future[Any] = exchange.get_future()
    return future.then(lambda done: whole.copy_(done.value()[0]))
