"""Synchronization of the ranks' weights, chosen once from the settings.

    gradients      DDP averages them during backward
    accumulation   only the last part of a batch exchanges them (--grad-accum-steps)
    fewer bytes    gradients travel as bfloat16, or as matrices of low rank (--grad-compression)
    local SGD      ranks step alone and average their weights now and then (--local-sgd-steps)
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
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from training.ranks import Ranks, without_exchange
from training.schedule import due
from training.settings.ranks import SyncSettings
from training.state import TrainingState
from training.sync.uneven_inputs import UnevenInputs, has_own_norms, norms_of_one_image

POWERSGD_RANK = 2  # of the matrices that stand for a gradient
WHOLE_SHARE = 0.1
"""The share of a run's steps in which powersgd and local SGD exchange whole gradients: the first
ones, in which weights change most."""


class GradientSync:
    """Makes every step of this rank a step of all ranks."""

    def __init__(
        self, config: SyncSettings, ranks: Ranks, state: TrainingState, steps: int
    ) -> None:
        """Take the steps of the whole run, on which it depends when ranks begin to step alone."""
        self.model = ranks.ddp(state.model)
        """What a step calls: the state's model, under DDP where there are other ranks."""
        self._config = config
        self._ranks = ranks
        self._state = state
        self._steps = steps
        self._uneven: UnevenInputs | None = None
        if ranks.world > 1:
            # Before UnevenInputs looks: Join cannot serve gradients that travel in another form.
            register_comm_hook(self.model, config, steps, state.step)
            self._uneven = UnevenInputs(ranks, self.model, state)

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
        local = not is_last or is_local_step(self._config, self._steps, self._state.step)
        with (
            without_exchange(self.model) if local else nullcontext(),
            norms_of_one_image(self._state.model) if images == 1 else nullcontext(),
        ):
            yield

    def average_weights(self, epoch_end: int, before_save: bool) -> None:
        """Give all ranks the same weights where a step under local SGD is due to end so.

        Also before anything is saved and at the end of an epoch: a checkpoint holds one rank's
        weights, and an evaluation is one model's.
        """
        every = self._config.local_sgd_steps
        if every and (before_save or due(self._state.step, every, epoch_end)):
            average_parameters(self._ranks, self._state)


def register_comm_hook(model: nn.Module, config: SyncSettings, steps: int, done: int) -> None:
    """Have a model's gradients exchanged in fewer bytes if the settings ask for it.

    bfloat16   Half the bytes of float32; sums lose about two digits. Pays where the
               network takes much of a step.
    powersgd   Matrices of rank 2 in place of the gradients of large layers (Vogels et al., 2019,
               arXiv:1905.13727), after a tenth of the run's `steps`, of which some may be `done`.
               Tens of times fewer bytes and more arithmetic: pays on 1 GbE and 10 GbE with large
               layers. What a step leaves out is added to the next one; that remainder is not in
               checkpoints, so a run that resumes loses it.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    if config.grad_compression == "bfloat16":
        model.register_comm_hook(None, _in_bfloat16)
    elif config.grad_compression == "powersgd":
        whole = max(2, round(steps * WHOLE_SHARE) - done)  # torch needs two steps to warm up
        state = PowerSGDState(None, POWERSGD_RANK, start_powerSGD_iter=whole)
        model.register_comm_hook(state, powerSGD_hook)


def _in_bfloat16(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    whole = bucket.buffer()
    # Divided before the sum: DDP expects a mean, and takes what the hook leaves as it is.
    short = whole.to(torch.bfloat16).div_(dist.get_world_size())
    exchange = dist.all_reduce(short, async_op=True)
    assert exchange is not None
    future: torch.futures.Future[Any] = exchange.get_future()
    return future.then(lambda done: whole.copy_(done.value()[0]))


def is_local_step(config: SyncSettings, steps: int, step: int) -> bool:
    """Return whether ranks take this step on their own, in a run of this many steps.

    Local SGD (PostLocalSGD; Lin et al., 2020, arXiv:1808.07217): gradients are exchanged for a
    tenth of the run; from there on each rank steps on its own, and after every N steps all ranks
    take the average. It pays where an exchange takes much longer than a step, as on 1 GbE, and
    costs some accuracy, the more the larger N is.
    """
    return config.local_sgd_steps > 0 and step >= round(steps * WHOLE_SHARE)


@torch.no_grad()
def average_parameters(ranks: Ranks, state: TrainingState) -> None:
    """Give all ranks the average of what they have learned.

    For plain and Nesterov's momentum and for the EMA, all of which are linear, averaging after
    every step is the same as exchanging gradients.
    """
    if ranks.world == 1:
        return
    parts = learned_by(state)
    # One exchange, not one for each tensor: on a slow network each costs a round trip.
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat)
    flat /= ranks.world
    sizes = [part.numel() for part in parts]
    for part, average in zip(parts, torch.split(flat, sizes), strict=True):
        part.copy_(average.view(part.shape))


def learned_by(state: TrainingState) -> list[torch.Tensor]:
    """Return everything that a step changes and that may differ between ranks.

    Two to four times the bytes of the gradients: so an average every N steps sends N/2 (sgd), N/3
    (adamw, or sgd with EMA) or N/4 (adamw with EMA) times less than gradients in each step.
    """
    weights = [weight for weight in state.model.parameters() if weight.requires_grad]
    momenta = [
        value
        for weight in weights
        for value in state.optimizer.state[weight].values()
        if isinstance(value, torch.Tensor) and value.shape == weight.shape  # not counts of steps
    ]
    followers = list(state.average.model.parameters()) if state.average else []
    return [*weights, *momenta, *followers]
