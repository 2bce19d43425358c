"""How ranks take the steps that DDP alone does not cover: those with few samples.

The last step of an exact epoch may have fewer samples than ranks. Those without mirror DDP's
exchange by torch's Join, and then get the whole state of one that computed. What ranks exchange is
the same on all of them, bit for bit, and so are their weights afterwards.

A batch norm that gets one value per channel, such as that of a single image after pooling, has no
variance to divide by, and uses its running statistics instead. These differ from rank to rank. So
before a step with a part of one image, and before a step that not every rank computes, all ranks
take the mean of their statistics; after the latter, all have those of a rank that computed it.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from rackrun.errors import UsageError
from rackrun.training.checkpoint import pack, unpack
from rackrun.training.layers import BATCH_NORMS
from rackrun.training.ranks import Ranks
from rackrun.training.state import TrainingState
from rackrun.units import plural


def require_join(model: nn.Module, last_samples: int, world: int) -> None:
    """Raise UsageError where an epoch ends with a step that not every rank can take part in."""
    why = ""
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        why = "batch norms exchange their statistics (SyncBatchNorm)"
    elif os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
        why = "torch checks every collective (TORCH_DISTRIBUTED_DEBUG=DETAIL)"
    if why and last_samples < world:
        raise UsageError(
            f"the last step of an epoch has {plural(last_samples, 'sample')} for {world} ranks, and"
            f" torch's Join cannot be used: {why}; type --resampled, or another --global-batch"
        )


def taken_by_all(
    ddp: DistributedDataParallel, state: TrainingState, ranks: Ranks, samples: int, fewest: int
) -> AbstractContextManager[None]:
    """Return the context of a step of that many samples over all ranks, `fewest` in a part."""
    # Before Join, inside of which any other exchange hangs. The plan tells all ranks the same
    # `fewest`, so all take part.
    if fewest <= 1 and own_norms(state.model):
        ranks.share_statistics(state.model)
    return joined_by_all(ddp, state, ranks) if samples < ranks.world else nullcontext()


@contextmanager
def norms_of_one_image(model: nn.Module, is_compiled: bool) -> Iterator[None]:
    """Run forward and backward of a part of one image, for which norms may lack a variance."""
    norms = [norm for norm in own_norms(model) if norm.training]  # not frozen ones
    hooks = [norm.register_forward_pre_hook(_with_usable_statistics) for norm in norms]
    # Compiled code would not know of the hooks, and another compilation takes minutes.
    is_eager = bool(norms) and is_compiled
    try:
        with torch.compiler.set_stance("force_eager") if is_eager else nullcontext():
            yield
    finally:
        for norm, hook in zip(norms, hooks, strict=True):
            hook.remove()
            norm.train()


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
