"""The ranks of a run: the identity and device of this process, and what all ranks exchange.

Ranks exchange three things outside of DDP's gradients: counts that are summed, a request that the
strongest decides (see training.run.stop_requests), and buffers. All live on the CPU
or are rare, so no step waits for a GPU.

All ranks must have the same world size, run and code. A host that finds no others trains alone and
succeeds, a rank that calls a port which two launches share joins the wrong ones, and a host with
yesterday's code computes other gradients. None of them fails by itself, so every rank looks before
its first step.

In an elastic run (--elastic) the world changes: a rank sets itself up alone, and is then in one
group after another, each with `Ranks` of its own (docs/concepts/elastic.md).
"""

import hashlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from rackrun.contract import variables
from rackrun.cuda import driver_here, gpu_problem
from rackrun.errors import Problem, UsageError
from rackrun.terminal import one_line
from rackrun.units import plural
from training.membership import FORMING_SECONDS, Generation, Membership
from training.settings.ranks import DeviceSettings


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
    members: tuple[int, ...] = ()
    """In an elastic run, by rank, the number that each has for the whole run."""
    generation: int = 0
    """The number of the group in an elastic run."""
    first_local_rank: int = 0
    """The lowest local rank of this host that is in the group."""

    @property
    def member(self) -> int:
        """The number that this rank has for the whole run, whatever the group."""
        return self.members[self.rank] if self.members else self.rank

    @property
    def first(self) -> bool:
        """Return True on rank 0, which writes for all."""
        return self.rank == 0

    @property
    def writes(self) -> bool:
        """Return True on the rank that writes for its node: any node may survive the others."""
        return self.local_rank == self.first_local_rank

    @property
    def share_a_host(self) -> bool:
        """Return True where all ranks are on this host; all ranks get the same result.

        In a group of an elastic run there may be as many as a host has, though on several hosts.
        """
        if not self.members:
            return self.world == self.local_world
        first = self.member - self.local_rank
        return all(0 <= member - first < self.local_world for member in self.members)

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
        device_ids = [self.device] if self.device.type == "cuda" else None
        before = [each.clone() for each in _statistics(model)]
        forward_only = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
        agreed = self.generation > 0  # on the state, so that DDP need not move it
        if not (forward_only or agreed):  # older torch, as 2.10, leaves them alone from the start
            self.broadcast_buffers(model)
        option = "forward_sync_buffers" if forward_only else "broadcast_buffers"
        never: dict[str, Any] = {option: False}
        distributed = DistributedDataParallel(
            model,
            device_ids=device_ids,
            gradient_as_bucket_view=True,
            init_sync=not agreed,
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

    def all_reduce_max_later(self, *numbers: int) -> "PendingMax":
        """Start the same for each of these numbers, between several ranks."""
        return PendingMax(numbers)

    def all_gather_later(self, numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to exchange as many numbers of each rank; return what waits for (world, n)."""
        if self.world == 1:
            return lambda: numbers[None]
        parts = [torch.empty_like(numbers) for _ in range(self.world)]
        exchange = dist.all_gather(parts, numbers, async_op=True)
        assert exchange is not None
        return lambda: torch.stack(parts) if exchange.wait() else numbers[None]

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

    def send_bytes(self, payload: bytes, target: int) -> None:
        """Give one rank these bytes, which it must `receive_bytes`."""
        dist.send(torch.tensor(len(payload)), target)
        dist.send(torch.frombuffer(bytearray(payload), dtype=torch.uint8), target)

    def receive_bytes(self, source: int) -> bytes:
        """Return what one rank sends to this one."""
        length = torch.tensor(0)
        dist.recv(length, source)
        content = torch.zeros(int(length), dtype=torch.uint8)
        dist.recv(content, source)
        return content.numpy().tobytes()


class PendingMax:
    """An exchange under way, of the largest of each of the numbers that the ranks give."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._largest = torch.tensor(numbers)
        self._work = dist.all_reduce(self._largest, dist.ReduceOp.MAX, async_op=True)

    @property
    def is_complete(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> list[int]:
        """Return the largest of each number, the same on all ranks."""
        if self._work:
            self._work.wait()
        largest: list[int] = self._largest.tolist()
        return largest


def _statistics(model: nn.Module) -> list[torch.Tensor]:
    """Return the running means and variances of a model's batch norms."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    buffers = [each for norm in norms for each in (norm.running_mean, norm.running_var)]
    return [each for each in buffers if each is not None]


def _fill(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    parts = torch.split(flat, [each.numel() for each in tensors])
    for each, part in zip(tensors, parts, strict=True):
        each.copy_(part.view_as(each))


def part_of(ranks: Ranks, count: int) -> range:
    """Return the part of so many things that is this rank's; parts differ by one at most."""
    return range(count * ranks.rank // ranks.world, count * (ranks.rank + 1) // ranks.world)


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
    dist.init_process_group(**_backend(config, ranks))
    _check_marks(ranks.all_gather(_fingerprint()))
    yield ranks  # a rank that fails leaves at once: destroying the group could wait for the others
    dist.destroy_process_group()


def _backend(config: DeviceSettings, ranks: Ranks) -> dict[str, Any]:
    on_gpu = ranks.device.type == "cuda"
    return {
        "backend": "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        "timeout": timedelta(seconds=config.collective_timeout_seconds),
        "device_id": ranks.device if on_gpu else None,
    }


def alone(config: DeviceSettings) -> Ranks:
    """Return this rank of an elastic run before it is in a group: none that writes for others."""
    # Else NCCL's watchdog would end this process when it sees that another one is lost.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    local_rank = _number("LOCAL_RANK", 0)
    return Ranks(
        rank=-1,
        world=1,
        local_rank=local_rank,
        local_world=_number("LOCAL_WORLD_SIZE", 1),
        device=_device(config.device, local_rank),
        first_local_rank=local_rank,
    )


def in_group(
    ranks: Ranks, order: Generation, membership: Membership, config: DeviceSettings
) -> Ranks:
    """Leave the group of these ranks for the one that was ordered; return the ranks there.

    Raise RuntimeError or OSError if that fails, as when another member is lost meanwhile.
    """
    _leave_group(ranks)
    first = order.members[order.rank] - ranks.local_rank
    local_ranks = [member - first for member in order.members]
    among = replace(
        ranks,
        rank=order.rank,
        world=order.world,
        members=order.members,
        generation=order.generation,
        first_local_rank=min(n for n in local_ranks if 0 <= n < ranks.local_world),
    )
    if among.world > 1:
        backend = _backend(config, ranks)
        store = _store(order, membership)
        dist.init_process_group(**backend, store=store, rank=among.rank, world_size=among.world)
        if ranks.device.type == "cuda":
            group = dist.distributed_c10d._get_default_group()
            membership.abort = group._get_backend(ranks.device).abort
        _check_marks(among.all_gather(_fingerprint()))
    return among


def _leave_group(ranks: Ranks) -> None:
    """End the group that this rank was in; its connections are shut down already."""
    if not dist.is_initialized():
        return
    if ranks.device.type == "cuda":  # NCCL would wait for ranks that are lost
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def is_of_exchange(error: Exception) -> bool:
    """Return whether an error is that of an exchange in which another rank had no part.

    torch raises a plain RuntimeError for most of them.
    """
    if isinstance(error, dist.DistError | ConnectionError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in EXCHANGES)


EXCHANGES = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")


def _store(order: Generation, membership: Membership) -> TCPStore:
    """Return the store of a group, which rank 0 keeps; each group has one of its own."""
    seconds = timedelta(seconds=FORMING_SECONDS)
    if order.rank == 0:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=seconds)
        membership.tell_members(order, store.port)
        return store
    port = membership.store_port(order)
    return TCPStore(order.master[0], port, wait_for_workers=False, timeout=seconds)


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


def planned_world() -> int:
    """Return the number of ranks that the launcher planned; without one, torchrun's."""
    return _number(variables.WORLD_SIZE, _number("WORLD_SIZE", 1))


def _check_world(world: int) -> None:
    """Refuse to train in a world that is not as large as the launcher planned."""
    if (promised := planned_world()) != world:
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


@cache
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
