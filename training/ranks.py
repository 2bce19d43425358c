"""The ranks of a run: the identity and device of this process, and what all ranks exchange.

Ranks exchange three things outside of DDP's gradients: counts that are summed, a request that the
strongest decides (see training.run.stop_requests), and buffers. All live on the CPU
or are rare, so no step waits for a GPU.
"""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from inspect import signature
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from rackrun.contract import variables
from rackrun.cuda import driver_here, gpu_problem
from rackrun.errors import Problem, UsageError
from rackrun.terminal import one_line
from rackrun.units import plural
from training.config import DeviceSettings
from training.consistency import check_marks, check_world, fingerprint


class DeviceError(Problem):
    """The GPUs of this host cannot be used."""

    exit_code = 78


Numbers = npt.NDArray[np.integer[Any]]
Rows = npt.NDArray[np.int32]


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
        """Return True on rank 0, which writes for all."""
        return self.rank == 0

    @property
    def writes(self) -> bool:
        """Return True on the rank that writes for its node: any node may survive the others."""
        return self.local_rank == 0

    @property
    def connected(self) -> bool:
        """Return True where there are other ranks, and this one has joined them."""
        return self.world > 1 and dist.is_initialized()

    def ddp(self, model: nn.Module) -> nn.Module:
        """Return the model as training calls it: under DDP where there are other ranks.

        Buffers are not broadcast at every step, which can double a small model's step; they are
        shared when they count (`share_statistics`).
        """
        if self.world == 1:
            return model
        before = [each.clone() for each in _statistics(model)]
        forward_only = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
        if not forward_only:  # older torch, as 2.10: then DDP leaves them alone from the beginning
            self.broadcast_buffers(model)
        option = "forward_sync_buffers" if forward_only else "broadcast_buffers"
        never: dict[str, Any] = {option: False}
        distributed = DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **never,
        )
        for each, own in zip(_statistics(model), before, strict=True):
            each.copy_(own)  # all begin with the other buffers of rank 0
        return distributed

    def all_reduce_sum(self, counts: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all ranks, on the CPU."""
        total = counts.detach().cpu()
        if self.world > 1:
            dist.all_reduce(total)
        return total

    def all_reduce_max(self, number: int) -> int:
        """Return the largest number that any rank gives; all ranks get the same result."""
        if self.world == 1:
            return number
        result = torch.tensor(number)
        dist.all_reduce(result, dist.ReduceOp.MAX)
        return int(result)

    def all_reduce_max_later(self, number: int) -> Callable[[], int]:
        """Start the same between several ranks; return what waits for the result."""
        result = torch.tensor(number)
        exchange = dist.all_reduce(result, dist.ReduceOp.MAX, async_op=True)
        assert exchange is not None
        return lambda: int(result) if exchange.wait() else number

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Give every rank the buffers of rank 0.

        They travel together, those of a type: a ResNet-50 has 159 of them.
        """
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in model.buffers() if self.world > 1 else ():
            by_type.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_type.values():
            together = torch.cat([buffer.flatten() for buffer in buffers])
            dist.broadcast(together, 0)
            parts = torch.split(together, [buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view_as(buffer))

    @torch.no_grad()
    def share_statistics(self, model: nn.Module) -> None:
        """Give every rank the mean of all ranks' statistics of batch norms; rank 0's other buffers.

        Each rank collects them from its own images.
        """
        own = _statistics(model) if self.world > 1 else []
        mean = torch.cat([each.flatten().double() for each in own]) if own else torch.zeros(0)
        if own:
            dist.all_reduce(mean)
            mean /= self.world  # of equal numbers exactly that number
        self.broadcast_buffers(model)
        _fill(own, mean)

    def gather_statistics(self, model: nn.Module) -> torch.Tensor | None:
        """Return the statistics of each rank, (world, numbers), on the CPU; None if all are equal.

        A run that goes on from them on as many ranks does not depend on where it was saved.
        """
        own = _statistics(model)
        if self.world == 1 or not own:
            return None
        flat = torch.cat([each.detach().flatten() for each in own]).cpu()
        parts = [torch.empty_like(flat) for _ in range(self.world)]
        dist.all_gather(parts, flat)
        together = torch.stack(parts)
        return None if torch.equal(together, together[:1].expand_as(together)) else together

    @torch.no_grad()
    def restore_statistics(self, model: nn.Module, gathered: object) -> None:
        """Give this rank its own statistics back, if they were gathered from as many ranks."""
        own = _statistics(model)
        shape = self.world, sum(each.numel() for each in own)
        if isinstance(gathered, torch.Tensor) and gathered.shape == shape:
            _fill(own, gathered[self.rank])

    def all_gather(self, numbers: Numbers) -> list[Numbers]:
        """Return, by rank, the numbers that it gives; each may give another amount."""
        if self.world == 1:
            return [numbers]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([numbers.size]))
        padded = torch.zeros(max(map(int, sizes)), dtype=torch.int64)
        padded[: numbers.size] = torch.from_numpy(numbers.astype(np.int64))
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return [
            part[: int(size)].numpy().astype(numbers.dtype)
            for part, size in zip(parts, sizes, strict=True)
        ]

    def gather(self, numbers: Rows, sizes: Sequence[int], to: Sequence[int]) -> Rows | None:
        """Return, on the ranks `to`, the numbers of all ranks, by rank; None on the others.

        `sizes`, how many each rank gives, count on the ranks `to`. Nothing is padded or converted,
        and the other ranks hold no more than their own.
        """
        own, together = torch.from_numpy(np.ascontiguousarray(numbers)), None
        for target in to:
            if self.rank != target:
                if own.numel():
                    dist.send(own, target)
                continue
            together = torch.empty(sum(sizes), dtype=own.dtype)
            for rank, part in enumerate(torch.split(together, list(sizes))):
                if rank == self.rank:
                    part.copy_(own)
                elif part.numel():
                    dist.recv(part, rank)
        return None if together is None else together.numpy()

    def broadcast_bytes(self, payload: bytes | None, source: int = 0) -> bytes:
        """Give every rank the bytes that one of them has; what the others give is ignored."""
        if self.world == 1:
            return payload or b""
        length = torch.tensor(len(payload or b""))
        dist.broadcast(length, source)
        content = torch.zeros(int(length), dtype=torch.uint8)
        if payload and self.rank == source:
            content = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.broadcast(content, source)
        return content.numpy().tobytes()


def _statistics(model: nn.Module) -> list[torch.Tensor]:
    """Return the running means and variances of a model's batch norms."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    found = [each for norm in norms for each in (norm.running_mean, norm.running_var)]
    return [each for each in found if each is not None]


def _fill(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    parts = torch.split(flat, [each.numel() for each in tensors])
    for each, part in zip(tensors, parts, strict=True):
        each.copy_(part.view_as(each))


def without_exchange(model: nn.Module) -> AbstractContextManager[None]:
    """Keep gradients local: for all but the last part of an accumulated step."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


@contextmanager
def joined(config: DeviceSettings) -> Iterator[Ranks]:
    """Join, as a rank, the world that torchrun describes, or a world of its own."""
    ranks = Ranks(
        rank=_number("RANK", 0),
        world=_number("WORLD_SIZE", 1),
        local_rank=(local_rank := _number("LOCAL_RANK", 0)),
        local_world=_number("LOCAL_WORLD_SIZE", 1),
        device=_device(config.device, local_rank),
    )
    check_world(ranks.world)
    if ranks.world == 1:
        yield ranks
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=config.collective_timeout_seconds),
        device_id=ranks.device if ranks.device.type == "cuda" else None,
    )
    check_marks(ranks.all_gather(fingerprint()))
    yield ranks  # a rank that fails leaves at once: destroying the group could wait for the others
    dist.destroy_process_group()


def _number(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def _device(wanted: str, local_rank: int) -> torch.device:
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if wanted == "auto" and not _has_been_given_a_gpu():
            return torch.device("cpu")
        if wanted == "auto":
            raise DeviceError(f"{socket.gethostname()}: {_why_no_gpu()}")
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"{socket.gethostname()}: local rank {local_rank} needs its own GPU, found"
            f" {plural(torch.cuda.device_count(), 'GPU')}; type --device cpu, or start fewer ranks"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    if why := _problem_with([capability]):
        raise DeviceError(f"{socket.gethostname()}: {why}")
    return device


def _has_been_given_a_gpu() -> bool:
    """Return True if the launcher counted ranks by GPUs, and these are not hidden."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    return bool(os.environ.get(variables.GPUS)) and not hidden


def _why_no_gpu() -> str:
    """Return why torch cannot use the GPUs that the launcher has counted."""
    why = _problem_with([])
    if not why:
        try:
            torch.zeros(1, device="cuda")
        except (RuntimeError, AssertionError) as error:
            why = f"torch cannot use the GPUs here: {one_line(str(error))}"
    return f"{why or 'torch finds no GPU'}; to train on the CPU type --device cpu"


def _problem_with(capabilities: list[str]) -> str:
    archs = " ".join(torch.cuda.get_arch_list())
    return gpu_problem(
        torch.__version__, torch.version.cuda or "", archs, driver_here(), capabilities
    )
