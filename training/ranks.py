"""The ranks of a run: the identity and device of this process, and what all ranks exchange.

Ranks exchange three things outside of DDP's gradients: counts that are summed, a request that the
strongest decides (see training.run.stop_requests), and buffers. All live on the CPU
or are rare, so no step waits for a GPU.

All ranks must have the same world size, run and code. A host that finds no others trains alone and
succeeds, a rank that calls a port which two launches share joins the wrong ones, and a host with
yesterday's code computes other gradients. None of them fails by itself, so every rank looks before
its first step.
"""

import hashlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from inspect import signature
from pathlib import Path
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


class DeviceError(Problem):
    """The GPUs of this host cannot be used."""

    exit_code = 78


class WorldError(Problem):
    """The ranks that came together are not those that were promised."""

    exit_code = 75


class CodeError(Problem):
    """The ranks do not run the same code."""

    exit_code = 78


ROOT = Path(__file__).parents[1]

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
        for each, kept in zip(_statistics(model), before, strict=True):
            each.copy_(kept)  # all begin with the other buffers of rank 0
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
        statistics = _statistics(model) if self.world > 1 else []
        mean = (
            torch.cat([each.flatten().double() for each in statistics])
            if statistics
            else torch.zeros(0)
        )
        if statistics:
            dist.all_reduce(mean)
            mean /= self.world  # of equal numbers exactly that number
        self.broadcast_buffers(model)
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
        rank_numbers, together = torch.from_numpy(np.ascontiguousarray(numbers)), None
        for target in to:
            if self.rank != target:
                if rank_numbers.numel():
                    dist.send(rank_numbers, target)
                continue
            together = torch.empty(sum(sizes), dtype=rank_numbers.dtype)
            for rank, part in enumerate(torch.split(together, list(sizes))):
                if rank == self.rank:
                    part.copy_(rank_numbers)
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
    buffers = [each for norm in norms for each in (norm.running_mean, norm.running_var)]
    return [each for each in buffers if each is not None]


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
    _check_world(ranks.world)
    if ranks.world == 1:
        yield ranks
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=config.collective_timeout_seconds),
        device_id=ranks.device if ranks.device.type == "cuda" else None,
    )
    _check_marks(ranks.all_gather(_fingerprint()))
    yield ranks  # a rank that fails leaves at once: destroying the group could wait for the others
    dist.destroy_process_group()


def _number(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def _device(device_option: str, local_rank: int) -> torch.device:
    if device_option == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if device_option == "auto" and not _has_been_given_a_gpu():
            return torch.device("cpu")
        if device_option == "auto":
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


def _check_world(world: int) -> None:
    """Refuse to train in a world that is not as large as the launcher planned."""
    promised = int(os.environ.get(variables.WORLD_SIZE, world))
    if promised != world:
        raise WorldError(
            f"{socket.gethostname()}: {promised} ranks were planned, but this rank's world has"
            f" {world}: the hosts did not find each other"
        )


def _fingerprint() -> Numbers:
    """Return what this rank compares with the others."""
    run = hashlib.sha256(os.environ.get(variables.RUN_ID, "").encode()).digest()
    return np.frombuffer(run + _code_digest(), dtype=np.uint8)


def _check_marks(marks: Sequence[Numbers]) -> None:
    """Refuse to train with ranks of another run, or of other code; `marks` is in rank order."""
    for rank, its in enumerate(marks):
        if not np.array_equal(its[:32], marks[0][:32]):
            raise WorldError(
                f"rank {rank} belongs to another run than rank 0: two launches share a port;"
                " type the same command again"
            )
        if not np.array_equal(its[32:], marks[0][32:]):
            raise CodeError(
                f"the code of rank {rank} is not that of rank 0: bring the same to every host,"
                " as --sync does"
            )


def _code_digest() -> bytes:
    """Return the SHA-256 of the program: training, shards, and the package that was started."""
    started = sys.modules["__main__"].__spec__
    names = {"training", "shards", started.name.partition(".")[0] if started else "training"}
    digest = hashlib.sha256()
    for path in sorted(path for name in names for path in (ROOT / name).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.digest()
