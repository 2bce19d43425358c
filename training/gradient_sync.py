"""How the ranks of a run take a step together: DDP, and torch's Join where some have no samples.

    gradients      DDP averages them during backward
    accumulation   only the last part of a batch exchanges them (--grad-accum-steps)
    fewer bytes    gradients travel as bfloat16 (--grad-compression)
    join           the last step of an exact epoch may have fewer samples than ranks; those without
                   mirror DDP's exchange, and then get the whole state of one that computed

What ranks exchange is the same on all of them, bit for bit, and so are their weights afterwards.

A batch norm that gets one value per channel, such as that of a single image after pooling, has no
variance to divide by, and uses its running statistics instead. These differ from rank to rank. So
before a step with a part of one image, and before a step that not every rank computes, all ranks
take the mean of their statistics; after the latter, all have those of a rank that computed it.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from rackrun.errors import UsageError
from rackrun.training.checkpoint import pack, unpack
from rackrun.training.config import Config
from rackrun.training.data.order import Cut
from rackrun.training.data.ring import Batch
from rackrun.training.layers import BATCH_NORMS
from rackrun.training.ranks import Ranks
from rackrun.training.state import TrainingState
from rackrun.units import plural


class GradientSync:
    """Makes every step of this rank a step of all ranks."""

    def __init__(self, config: Config, ranks: Ranks, state: TrainingState) -> None:
        self.model = ranks.ddp(state.model)
        """What a step calls: the state's model, under DDP where there are other ranks."""
        self.ddp = self.model if isinstance(self.model, DistributedDataParallel) else None
        """The same, where there are other ranks."""
        self._config, self._ranks, self._state = config, ranks, state
        if self.ddp and config.grad_compression == "bfloat16":
            # Half the bytes of float32; sums lose about two digits.
            self.ddp.register_comm_hook(None, bf16_compress_hook)

    def parts(self, cut: Cut, samples: int) -> tuple[int, int]:
        """Return in how many parts this rank computes its batch, and the fewest samples of any."""
        per_part = self._config.batch_size // self._config.grad_accum_steps
        parts, fewest = _parts_and_fewest(cut, samples, per_part)
        return parts[self._ranks.rank], fewest

    def require_join(self, last_samples: int) -> None:
        """Raise UsageError where an epoch ends with a step that not every rank can take part in."""
        why = ""
        if any(isinstance(module, nn.SyncBatchNorm) for module in self._state.model.modules()):
            why = "batch norms exchange their statistics (SyncBatchNorm)"
        elif os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
            why = "torch checks every collective (TORCH_DISTRIBUTED_DEBUG=DETAIL)"
        if why and last_samples < self._ranks.world:
            raise UsageError(
                f"the last step of an epoch has {plural(last_samples, 'sample')} for"
                f" {self._ranks.world} ranks, and torch's Join cannot be used: {why}; type"
                " --resampled, or another --global-batch"
            )

    def step(self, samples: int, fewest: int) -> AbstractContextManager[None]:
        """Run a step of that many samples over all ranks, `fewest` in a part, in this context."""
        if not self.ddp:
            return nullcontext()
        # Before Join, inside of which any other exchange hangs. The plan tells all ranks the same
        # `fewest`, so all take part.
        if fewest <= 1 and own_norms(self._state.model):
            self._ranks.share_statistics(self._state.model)
        if samples >= self._ranks.world:
            return nullcontext()
        return joined_by_all(self.ddp, self._state, self._ranks)

    @contextmanager
    def part(self, images: int, is_last: bool) -> Iterator[None]:
        """Run forward and backward of a part of a batch; only the last part exchanges gradients."""
        # DDP must be left out during forward already: that is where it prepares its exchange.
        with (
            self.ddp.no_sync() if self.ddp and not is_last else nullcontext(),
            self._norms_of_one_image() if images == 1 else nullcontext(),
        ):
            yield

    @contextmanager
    def _norms_of_one_image(self) -> Iterator[None]:
        norms = [norm for norm in own_norms(self._state.model) if norm.training]  # not frozen ones
        hooks = [norm.register_forward_pre_hook(_with_usable_statistics) for norm in norms]
        # Compiled code would not know of the hooks, and another compilation takes minutes.
        is_compiled = bool(norms) and self._config.compile
        try:
            with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
                yield
        finally:
            for norm, hook in zip(norms, hooks, strict=True):
                hook.remove()
                norm.train()


def split(batch: Batch, parts: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the images and labels of a batch in the parts that are computed one after another."""
    if parts == 1:
        return [(batch.images, batch.labels)]
    images, labels = batch.images.tensor_split(parts), batch.labels.tensor_split(parts)
    return list(zip(images, labels, strict=True))


@lru_cache(8)  # all steps but an epoch's last have the same answer
def _parts_and_fewest(cut: Cut, samples: int, per_part: int) -> tuple[tuple[int, ...], int]:
    # By rank, in how many parts it computes its samples; and the fewest samples of any part. Under
    # an even cut equally many on all ranks, as SyncBatchNorm needs: it exchanges in each.
    sizes = cut.sizes(samples)
    largest = np.maximum(sizes, sizes.max()) if cut.is_even else sizes
    parts = np.maximum(1, -(-largest // per_part))
    return tuple(parts.tolist()), int((sizes // parts).min())


def _with_usable_statistics(norm: nn.Module, inputs: tuple[torch.Tensor]) -> None:
    # float (B, channels, ...): the norm of a convolution has a value per pixel, and can train.
    norm.train(inputs[0].numel() > inputs[0].shape[1])
    if not norm.training and norm.num_batches_tracked == 0:
        raise UsageError(
            "a batch norm gets one value per channel from a part of one image, too few for"
            " statistics: type a larger --batch-size, or a smaller --grad-accum-steps"
        )


def own_norms(model: nn.Module) -> list[nn.Module]:
    """Return the batch norms whose statistics are this rank's own."""
    norms = [module for module in model.modules() if isinstance(module, BATCH_NORMS)]
    return [norm for norm in norms if not isinstance(norm, nn.SyncBatchNorm)]


@contextmanager
def joined_by_all(
    model: DistributedDataParallel, state: TrainingState, ranks: Ranks
) -> Iterator[None]:
    """Run a step that only ranks with samples compute; all ranks have the same state after it."""
    joinables = [model, StateBroadcast(model, state, ranks)]
    with Join(joinables):
        yield
    Join(joinables, enable=False)  # else DDP goes on announcing every step to ranks that left


class StateBroadcast(Joinable, JoinHook):
    """Hands the whole state of the last rank that computed to all others, when Join ends.

    Join itself hands over the parameters alone.
    """

    def __init__(self, model: DistributedDataParallel, state: TrainingState, ranks: Ranks) -> None:
        super().__init__()
        self._model, self._state, self._ranks = model, state, ranks

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that Join calls on ranks that have nothing left."""
        return self

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give every rank the state of one that computed the step, bit for bit."""
        # Every rank that computed to the end is a last joiner, and all of them have the same state.
        ranks, state = self._ranks, self._state
        source = ranks.all_reduce_max(ranks.rank if is_last_joiner else -1)
        is_source = ranks.rank == source
        payload = ranks.broadcast_bytes(pack(state.state_dict()) if is_source else None, source)
        if not is_source:
            state.load_state_dict(unpack(payload))

    @property
    def join_device(self) -> torch.device:
        """The device of Join's own counts."""
        device: torch.device = self._model.join_device
        return device

    @property
    def join_process_group(self) -> Any:
        """The process group that joins."""
        return self._model.join_process_group
