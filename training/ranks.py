"""The ranks of a run: the identity and device of this process, and what all ranks exchange.

Ranks exchange three things outside of DDP's gradients: counts that are summed, a request that the
strongest decides (see training.stop_requests), and buffers. All live on the CPU
or are rare, so no step waits for a GPU.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from rackrun.errors import UsageError
from rackrun.machine import core_count
from rackrun.training.layers import BATCH_NORMS

Numbers = npt.NDArray[np.integer[Any]]

EXCHANGES = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
"""Words in torch's errors of an exchange, most of which have no class of their own."""
SOURCE_LINE = re.compile(r"\[\S*/gloo/\S+:\d+\] ")
"""What gloo's errors begin with: [/build/gloo/gloo/transport/tcp/pair.cc:561]."""


@dataclass(frozen=True)
class Ranks:
    """This process among all of the run."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """True on rank 0, which writes for all."""
        return self.rank == 0

    @property
    def writes(self) -> bool:
        """True on the rank that writes for its node: any node may survive the others."""
        return self.local_rank == 0

    @property
    def share_a_host(self) -> bool:
        """Return True where all ranks are on this host; all ranks get the same result."""
        return self.world == self.local_world

    @property
    def connected(self) -> bool:
        """True where there are other ranks, and this one has joined them."""
        return self.world > 1 and dist.is_initialized()

    def ddp(self, model: nn.Module, compression: str = "none") -> DistributedDataParallel | None:
        """Return the model under DDP, which averages gradients; None where this rank is alone.

        Buffers are not broadcast at every step, which can double a small model's step; they are
        shared when they count (`share_statistics`).
        """
        if self.world == 1:
            return None
        device_ids = [self.device] if self.device.type == "cuda" else None
        # DDP begins by giving all ranks the buffers of rank 0. Running statistics are put back
        # after that: those of a run that goes on are this rank's own.
        statistics = [each.clone() for each in _statistics(model)]
        forward_only = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
        if not forward_only:  # older torch, as 2.10, leaves them alone from the start
            self.broadcast_buffers(model)
        option = "forward_sync_buffers" if forward_only else "broadcast_buffers"
        never: dict[str, Any] = {option: False}
        distributed = DistributedDataParallel(
            model,
            device_ids=device_ids,
            gradient_as_bucket_view=True,  # no second copy of what travels
            **never,
        )
        for each, kept in zip(_statistics(model), statistics, strict=True):
            each.copy_(kept)
        if compression == "bfloat16":
            # Half the bytes of float32; sums lose about two digits.
            distributed.register_comm_hook(None, bf16_compress_hook)
        return distributed

    def all_reduce_sum(self, counts: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all ranks, on the CPU."""
        total = counts.detach().cpu()  # waits for the device: hence once per line of the log
        if self.world > 1:
            dist.all_reduce(total)
        return total

    def all_reduce_max(self, number: int) -> int:
        """Return the largest number that any rank gives; all ranks get the same result."""
        if self.world == 1:
            return number
        result = torch.tensor(number)  # on the CPU: it goes by gloo, and waits for no GPU
        dist.all_reduce(result, dist.ReduceOp.MAX)
        return int(result)

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Give every rank the buffers of rank 0.

        They travel together, those of a type: a ResNet-50 has 159 of them.
        """
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in model.buffers():
            by_type.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_type.values():
            together = torch.cat([buffer.flatten() for buffer in buffers])
            dist.broadcast(together, 0)
            _fill(buffers, together)

    @torch.no_grad()
    def share_statistics(self, model: nn.Module) -> None:
        """Give every rank the mean of all ranks' statistics of batch norms; rank 0's other buffers.

        Each rank collects them from its own images.
        """
        if self.world == 1:
            return
        statistics = _statistics(model)
        if statistics:
            mean = torch.cat([each.flatten().double() for each in statistics])
            dist.all_reduce(mean)
            mean /= self.world  # of equal numbers exactly that number
        self.broadcast_buffers(model)  # statistics among them: hence before these are filled
        if statistics:
            _fill(statistics, mean)

    def gather_statistics(self, model: nn.Module) -> torch.Tensor | None:
        """Return the statistics of each rank, (world, numbers), on the CPU; None if all are equal.

        A run that goes on from them on as many ranks does not depend on where it was saved.
        """
        statistics = _statistics(model)
        if self.world == 1 or not statistics:
            return None
        flat = torch.cat([each.detach().flatten() for each in statistics]).cpu()
        parts = [torch.empty_like(flat) for _ in range(self.world)]
        dist.all_gather(parts, flat)
        together = torch.stack(parts)
        return None if torch.equal(together, together[:1].expand_as(together)) else together

    @torch.no_grad()
    def restore_statistics(self, model: nn.Module, gathered: object) -> None:
        """Give this rank its own statistics back, if they were gathered from as many ranks."""
        statistics = _statistics(model)
        shape = self.world, sum(each.numel() for each in statistics)
        if isinstance(gathered, torch.Tensor) and gathered.shape == shape:
            _fill(statistics, gathered[self.rank])

    def gather(self, payload: bytes) -> list[bytes]:
        """Return, by rank, the bytes that it gives."""
        if self.world == 1:
            return [payload]
        # Collectives take tensors of one shape: so all learn the sizes, and pad to the largest.
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(payload)]))
        own = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
        own[: len(payload)] = torch.from_numpy(np.frombuffer(bytearray(payload), np.uint8))
        parts = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(parts, own)
        return [part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def on_first(self, make: Callable[[], Any]) -> Any:
        """Return on all ranks what the first one makes, plain data; all raise its UsageError."""
        answer = b""
        if self.first:
            try:
                answer = json.dumps([make(), ""]).encode()
            except UsageError as problem:
                answer = json.dumps([None, str(problem)]).encode()
        made, problem_text = json.loads(self.broadcast_bytes(answer))
        if problem_text:
            raise UsageError(problem_text)
        return made

    def broadcast_bytes(self, payload: bytes | None, source: int = 0) -> bytes:
        """Give every rank the bytes that one of them has; what the others give is ignored."""
        if self.world == 1:
            return payload or b""
        length = torch.tensor(len(payload or b""))
        dist.broadcast(length, source)
        # Bytes, not pickles: what another host sends must not run as code here.
        content = torch.zeros(int(length), dtype=torch.uint8)
        if payload and self.rank == source:  # a bytearray, as torch wants memory that it may write
            content = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.broadcast(content, source)
        return content.numpy().tobytes()


def _statistics(model: nn.Module) -> list[torch.Tensor]:
    norms = [module for module in model.modules() if isinstance(module, BATCH_NORMS)]
    buffers = [each for norm in norms for each in (norm.running_mean, norm.running_var)]
    return [each for each in buffers if each is not None]


def _fill(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    parts = torch.split(flat, [each.numel() for each in tensors])
    for each, part in zip(tensors, parts, strict=True):
        each.copy_(part.view_as(each))


def part_of(ranks: Ranks, count: int) -> range:
    """Return this rank's part of `count` items; parts differ by one at most."""
    return range(count * ranks.rank // ranks.world, count * (ranks.rank + 1) // ranks.world)


def usual_workers(ranks: Ranks) -> int:
    """Return the loader workers for a rank's cores; a model on the CPU needs most of them."""
    cores = core_count() // ranks.local_world
    return max(1, min(cores - 1, 16) if ranks.device.type == "cuda" else cores // 4)


def text_of_exchange(error: Exception) -> str:
    """Return what an error of an exchange says, without gloo's line of source and its advice."""
    return SOURCE_LINE.sub("gloo: ", str(error)).partition(". This is typically")[0]


def is_of_exchange(error: Exception) -> bool:
    """Return whether an error is that of an exchange in which another rank had no part."""
    if isinstance(error, dist.DistError | ConnectionError):
        return True
    return isinstance(error, RuntimeError) and any(name in str(error) for name in EXCHANGES)
