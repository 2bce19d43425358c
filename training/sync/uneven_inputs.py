"""The last step of an exact epoch, when it has fewer samples than there are ranks.

The ranks that have samples compute the step; the others must neither hang them nor miss it.
There are two ways:

join    The others mirror DDP's exchange of gradients (torch's Join) and contribute nothing. They
        miss more than the parameters that Join hands them: the optimizer's state, the EMA,
        buffers, the step count. `StateBroadcast` hands them all of it.
even    Every rank computes the step, some with a batch of no images: gradients of zero, and
        statistics that leave nothing out and put nothing in. For models that exchange more than
        gradients (SyncBatchNorm), static graphs and sharded optimizers, which Join cannot serve.

Both give what one process gives on the same samples. All other steps have samples on every rank,
at most one more here than there, and need nothing.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from training.checkpoint import pack, unpack
from training.ranks import Ranks
from training.state import TrainingState


class UnevenInputs:
    """How the ranks of a run take such a step together."""

    def __init__(self, ranks: Ranks, model: nn.Module, state: TrainingState) -> None:
        self.ranks = ranks
        self.model = model
        self.state = state
        self.obstacle = why_not_join(model, state.optimizer)

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
    """Return what Join cannot serve, in a few words; empty when it can."""
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "batch norms exchange their statistics"
    if isinstance(model, DistributedDataParallel) and model.static_graph:
        return "the graph is static"
    if isinstance(model, DistributedDataParallel) and model._comm_hooks:
        return "gradients travel in another form"
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


class StateBroadcast(Joinable):
    """Hands the whole state of the last rank that computed to all others, when Join ends."""

    def __init__(self, model: DistributedDataParallel, state: TrainingState, ranks: Ranks) -> None:
        super().__init__()
        self.model = model
        self.state = state
        self.ranks = ranks

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that Join calls on ranks that have nothing left."""
        return _Hook(self.state, self.ranks)

    @property
    def join_device(self) -> torch.device:
        """Return the device of Join's own counts."""
        device: torch.device = self.model.join_device
        return device

    @property
    def join_process_group(self) -> Any:
        """Return the process group that joins."""
        return self.model.join_process_group


class _Hook(JoinHook):
    def __init__(self, state: TrainingState, ranks: Ranks) -> None:
        self.state = state
        self.ranks = ranks

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give every rank the state of one that computed the step."""
        # Every rank that computed to the end is a last joiner, and all of them have the same state.
        source = self.ranks.all_reduce_max(self.ranks.rank if is_last_joiner else -1)
        broadcast_state(self.state, self.ranks, source)


def broadcast_state(state: TrainingState, ranks: Ranks, source: int) -> None:
    """Give every rank the state of this one, bit for bit."""
    is_source = ranks.rank == source
    payload = ranks.broadcast_bytes(pack(state.state_dict()) if is_source else None, source)
    if not is_source:
        state.load_state_dict(unpack(payload))
