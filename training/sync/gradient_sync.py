"""Synchronization of the ranks' weights, chosen once from the settings.

    gradients      DDP averages them during backward, as they are or in fewer bytes (comm_hooks)
    accumulation   only the last part of a batch exchanges them (--grad-accum-steps)
    local SGD      ranks step alone and average their weights now and then (--local-sgd-steps)
    uneven inputs  the last step of an exact epoch may have fewer samples than ranks
    batch norms    a rank, or a part of its batch, may have a single image

The loop marks where a step and its parts begin; it need not know which of these is at work.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

from training.ranks import Ranks, without_exchange
from training.schedule import due
from training.settings.ranks import SyncSettings
from training.state import TrainingState
from training.sync.batch_norms import BatchNorms
from training.sync.comm_hooks import gradient_buffer_like, register_comm_hook
from training.sync.local_sgd import PeriodicExchange, average_parameters, is_local_step
from training.sync.uneven_inputs import UnevenInputs


class GradientSync:
    """Makes every step of this rank a step of all ranks."""

    def __init__(
        self, config: SyncSettings, ranks: Ranks, state: TrainingState, steps: int
    ) -> None:
        """Take the steps of the whole run, on which it depends when ranks begin to step alone."""
        self.model = ranks.ddp(state.model)
        """What a step calls: the state's model, under DDP where there are other ranks."""
        # Before UnevenInputs looks: Join cannot serve gradients that travel in another form.
        register_comm_hook(self.model, config, steps, state.step)
        self._config = config
        self._ranks = ranks
        self._state = state
        self._steps = steps
        self._uneven = UnevenInputs(ranks, self.model, state)
        self._norms = BatchNorms(state.model, ranks)

    def remark(self, last_samples: int) -> str:
        """Return a line about a last step with this many samples; empty if it is as any other."""
        return self._uneven.remark(last_samples)

    def step(self, samples: int, fewest: int) -> AbstractContextManager[None]:
        """Run a step of that many samples over all ranks, `fewest` in a part, in this context."""
        self._norms.share(fewest)  # before Join, inside of which any other exchange hangs
        return self._uneven.at(samples)

    def has_work(self, planned: int) -> bool:
        """Return whether this rank, for which that many samples are planned, computes the step."""
        return self._uneven.computes(planned)

    @contextmanager
    def part(self, images: int, is_last: bool) -> Iterator[None]:
        """Run forward and backward of a part of a batch; only the last part exchanges gradients."""
        # DDP must be left out during forward already: that is where it prepares its exchange.
        local = not is_last or is_local_step(self._config, self._steps, self._state.step)
        with (
            without_exchange(self.model) if local else nullcontext(),
            self._norms.part(images),
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

    @property
    def gradient_buffer(self) -> torch.Tensor | None:
        """A tensor of the size and type of what a step sends; None where it is no plain sum."""
        return gradient_buffer_like(self.model, self._config)

    @property
    def periodic_exchange(self) -> PeriodicExchange | None:
        """The exchange of local SGD, None without it."""
        if not self._config.local_sgd_steps:
            return None
        exchange = partial(average_parameters, self._ranks, self._state)
        return PeriodicExchange(exchange, self._config.local_sgd_steps)
