"""How ranks come together: in the world that torchrun describes, or in a group of an elastic run.

All ranks must have the same world size, run and code. A host that finds no others trains alone and
succeeds, a rank that calls a port which two launches share joins the wrong ones, and a host with
yesterday's code computes other gradients. None of them fails by itself, so every rank looks before
its first step.
"""

import hashlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from rackrun.contract import variables
from rackrun.errors import Problem
from rackrun.training.device import rank_device
from rackrun.training.membership import FORMING_SECONDS, GroupOrder, RankMembership
from rackrun.training.ranks import Numbers, Ranks
from rackrun.training.settings.ranks import DeviceSettings

ROOT = Path(__file__).parents[1]
COLLECTIVE_TIMEOUT = timedelta(minutes=20)  # a launcher notices hangs earlier
OF_A_HOST = {"cache", "cache_size", "data", "resume", "run_folder", "weights", "workers"}
"""Settings that name a place or a number on a host, and may differ between hosts."""


class WorldError(Problem):
    """The ranks that came together are not those that were promised."""

    exit_code = 75


class UnlikeRanks(Problem):
    """The ranks do not run the same code, or not with the same settings."""

    exit_code = 78


@contextmanager
def joined(config: DeviceSettings) -> Iterator[Ranks]:
    """Join, as a rank, the world that torchrun describes, or a world of its own."""
    ranks = Ranks(
        rank=_number("RANK", 0),
        world=_number("WORLD_SIZE", 1),
        local_rank=(local_rank := _number("LOCAL_RANK", 0)),
        local_world=_number("LOCAL_WORLD_SIZE", 1),
        device=rank_device(config.device, local_rank),
    )
    # torchrun's rendezvous compares clocks: with one host 20 s behind, each trained alone, exit 0.
    if (promised := planned_world()) != ranks.world:
        raise WorldError(
            f"{socket.gethostname()}: {promised} ranks were planned, but this rank's world has"
            f" {ranks.world}: the hosts did not find each other"
        )
    if ranks.world == 1:
        yield ranks
        return
    dist.init_process_group(**_backend(ranks))
    # The first exchange: what is not equal now shows in no later one.
    _check_fingerprints(ranks.all_gather(_fingerprint(config)))
    yield ranks  # a rank that fails leaves at once: destroying the group could wait for the others
    dist.destroy_process_group()


def _backend(ranks: Ranks) -> dict[str, Any]:
    on_gpu = ranks.device.type == "cuda"
    return {
        # What lies on the CPU travels by gloo: no exchange of counts waits for a stream of the GPU.
        "backend": "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        "timeout": COLLECTIVE_TIMEOUT,
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
        device=rank_device(config.device, local_rank),
        first_local_rank=local_rank,
    )


def in_group(
    ranks: Ranks, order: GroupOrder, membership: RankMembership, config: DeviceSettings
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
        backend = _backend(ranks)
        store = _store(order, membership)
        dist.init_process_group(**backend, store=store, rank=among.rank, world_size=among.world)
        if ranks.device.type == "cuda":  # NCCL waits on the device: to end sockets does not wake it
            group = dist.distributed_c10d._get_default_group()
            membership.abort = group._get_backend(ranks.device).abort
        _check_fingerprints(among.all_gather(_fingerprint(config)))
    return among


def _leave_group(ranks: Ranks) -> None:
    # The connections of the group that this rank was in are shut down already.
    if not dist.is_initialized():
        # torch numbers groups in each process, and ranks of unlike numbers wait for each other for
        # ever: one whose last group was never formed has counted it, and a newcomer has not.
        dist.distributed_c10d._world.group_count = 0
        return
    if ranks.device.type == "cuda":  # NCCL would wait for ranks that are lost
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def _store(order: GroupOrder, membership: RankMembership) -> TCPStore:
    # Rank 0 keeps it; each group has one of its own.
    seconds = timedelta(seconds=FORMING_SECONDS)
    if order.rank == 0:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=seconds)
        membership.tell_members(order, store.port)
        return store
    port = membership.store_port(order)
    return TCPStore(order.master[0], port, wait_for_workers=False, timeout=seconds)


def planned_world() -> int:
    """Return the number of ranks that the launcher planned; without one, torchrun's."""
    return _number(variables.WORLD_SIZE, _number("WORLD_SIZE", 1))


def _fingerprint(config: DeviceSettings) -> Numbers:
    run = hashlib.sha256(os.environ.get(variables.RUN_ID, "").encode()).digest()
    same = sorted(item for item in vars(config).items() if item[0] not in OF_A_HOST)
    settings = hashlib.sha256(repr(same).encode()).digest()
    return np.frombuffer(run + _code_digest() + settings, dtype=np.uint8)


def _check_fingerprints(by_rank: Sequence[Numbers]) -> None:
    for rank, fingerprint in enumerate(by_rank):
        if not np.array_equal(fingerprint[:32], by_rank[0][:32]):
            raise WorldError(
                f"rank {rank} belongs to another run than rank 0: two launches share a port;"
                " type the same command again"
            )
        if not np.array_equal(fingerprint[32:64], by_rank[0][32:64]):
            raise UnlikeRanks(
                f"the code of rank {rank} is not that of rank 0: bring the same to every host,"
                " as --sync does"
            )
        if not np.array_equal(fingerprint[64:], by_rank[0][64:]):
            raise UnlikeRanks(
                f"the settings of rank {rank} are not those of rank 0: start every rank with the"
                " same options"
            )


def _number(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


@cache
def _code_digest() -> bytes:
    # The program: training, shards, and the package that was started, as `rackrun.catdog`.
    started = sys.modules["__main__"].__spec__
    names = {"training", "shards"}
    if started and started.name.startswith("rackrun."):
        names.add(started.name.split(".")[1])
    digest = hashlib.sha256()
    for path in sorted(path for name in names for path in (ROOT / name).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.digest()
