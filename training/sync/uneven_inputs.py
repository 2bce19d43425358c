"""Steps in which a rank, or a part of its batch, has a single image, or none.

The last step of an exact epoch may have fewer samples than there are ranks. The ranks that have
samples compute it; the others must neither block them nor miss it. There are two ways:

join    The others mirror DDP's exchange of gradients (torch's Join) and contribute nothing. They
        miss more than the parameters that Join hands them: the optimizer's state, the EMA,
        buffers, the step count. `StateBroadcast` hands them all of it.
even    Every rank computes the step, some with a batch of no images: gradients of zero, and
        statistics that leave nothing out and put nothing in. For models that exchange more than
        gradients (SyncBatchNorm), static graphs and sharded optimizers, which Join cannot serve.

Both give what one process gives on the same samples. All other steps have samples on every rank,
at most one more here than there, and need nothing.

A batch norm that gets one value per channel, as of a single image after a pooling, has no variance
to divide by: it then uses its running statistics, which differ from rank to rank. So all ranks take
their mean first (`GradientSync.step`), in such a step and in one that not every rank computes,
after which all have the statistics of a rank that did.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from rackrun.errors import UsageError
from rackrun.training.checkpoint import pack, unpack
from rackrun.training.layers import BATCH_NORMS
from rackrun.training.ranks import Ranks
from rackrun.training.state import TrainingState


class UnevenInputs:
    """How the ranks of a run take a step with fewer samples than ranks."""

    def __init__(
        self, ranks: Ranks, model: nn.Module, state: TrainingState, obstacle: str = ""
    ) -> None:
        """Take what Join cannot serve, beside what the model shows."""
        self.ranks = ranks
        self.model = model
        self.state = state
        self.obstacle = obstacle or why_not_join(model, state.optimizer)

    def remark(self, last: int) -> str:
        """Return a line about a last step with this many samples; empty if it is as any other."""
        if last >= self.ranks.world or not self.obstacle:
            return ""
        return (
            f"the last step of an epoch has {last} samples for {self.ranks.world} ranks; it runs"
            f" the even way, without Join: {self.obstacle}"
        )

    def at(self, samples: int) -> AbstractContextManager[None]:
        """Return the context for a step of this many samples over all ranks."""
        if samples >= self.ranks.world or self.obstacle:
            return nullcontext()
        return joined_by_all(self.model, self.state, self.ranks)

    def computes(self, planned: int) -> bool:
        """Return whether this rank, for which this many samples are planned, computes the step.

        It does, too, when all of them were left out as damaged: the others count on it.
        """
        return planned > 0 or bool(self.obstacle)


def why_not_join(model: nn.Module, optimizer: Optimizer) -> str:
    """Return what Join cannot serve, as the remark has it; empty when it can."""
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "batch norms exchange their statistics"
    if isinstance(model, DistributedDataParallel) and model.static_graph:
        return "the graph is static"
    if isinstance(optimizer, Joinable):  # torch.distributed.optim.ZeroRedundancyOptimizer
        return "the optimizer's state is sharded"
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
        return "torch checks every collective"
    return ""


@contextmanager
def joined_by_all(model: nn.Module, state: TrainingState, ranks: Ranks) -> Iterator[None]:
    """Run a step that only ranks with samples compute; all ranks have the same state after it."""
    assert isinstance(model, DistributedDataParallel)
    joinables = [model, StateBroadcast(model, state, ranks)]
    with Join(joinables):
        yield
    Join(joinables, enable=False)  # else DDP goes on announcing every step to ranks that left


class StateBroadcast(Joinable, JoinHook):
    """Hands the whole state of the last rank that computed to all others, when Join ends."""

    def __init__(self, model: DistributedDataParallel, state: TrainingState, ranks: Ranks) -> None:
        super().__init__()
        self.model = model
        self.state = state
        self.ranks = ranks

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that Join calls on ranks that have nothing left."""
        return self

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give every rank the state of one that computed the step."""
        # Every rank that computed to the end is a last joiner, and all of them have the same state.
        source = self.ranks.all_reduce_max(self.ranks.rank if is_last_joiner else -1)
        broadcast_state(self.state, self.ranks, source)

    @property
    def join_device(self) -> torch.device:
        """The device of Join's own counts."""
        device: torch.device = self.model.join_device
        return device

    @property
    def join_process_group(self) -> Any:
        """The process group that joins."""
        return self.model.join_process_group


def broadcast_state(state: TrainingState, ranks: Ranks, source: int) -> None:
    """Give every rank the state of this one, bit for bit."""
    is_source = ranks.rank == source
    payload = ranks.broadcast_bytes(pack(state.state_dict()) if is_source else None, source)
    if not is_source:
        state.load_state_dict(unpack(payload))


def has_own_norms(model: nn.Module) -> bool:
    """Return whether a model has batch norms whose statistics are this rank's own."""
    return any(map(_is_own_norm, model.modules()))


def _is_own_norm(module: nn.Module) -> bool:
    return isinstance(module, BATCH_NORMS) and not isinstance(module, nn.SyncBatchNorm)


@contextmanager
def norms_of_one_image(model: nn.Module, compiled: bool) -> Iterator[None]:
    """Compute a part of a single image: norms of one value per channel use running statistics."""
    trained = {  # frozen ones use their running statistics anyway
        name: module
        for name, module in model.named_modules()
        if _is_own_norm(module) and module.training
    }
    if not trained:
        yield
        return
    hooks = [
        norm.register_forward_pre_hook(partial(_with_usable_statistics, name))
        for name, norm in trained.items()
    ]
    # Compiled code would not know of the hooks, and another compilation takes minutes.
    try:
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield
    finally:
        # The hooks have put norms of one value into evaluation mode, for this part alone.
        for norm, hook in zip(trained.values(), hooks, strict=True):
            hook.remove()
            norm.train()


def _with_usable_statistics(name: str, norm: nn.Module, inputs: tuple[torch.Tensor]) -> None:
    assert isinstance(norm, BATCH_NORMS)
    # float (B, channels, ...): the norm of a convolution has a value per pixel, and can train.
    norm.train(inputs[0].numel() > inputs[0].shape[1])
    if not norm.training and not norm.num_batches_tracked:
        raise UsageError(
            f"the batch norm {name} has one value per channel in a part of one image, and no"
            " statistics yet: type a larger --batch-size, or a smaller --grad-accum-steps"
        )
