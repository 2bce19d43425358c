"""How ranks come together: in the world that torchrun describes.

All ranks must have the same world size, run and code. A host that finds no others trains alone and
succeeds, a rank that calls a port which two launches share joins the wrong ones, and a host with
yesterday's code computes other gradients. None of them fails by itself, so every rank looks before
its first step.
"""

import hashlib
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rackrun.contract import variables
from rackrun.contract.tasks import TASKS
from rackrun.errors import Problem
from rackrun.training.device import rank_device
from rackrun.training.ranks import Ranks
from rackrun.training.settings.ranks import DeviceSettings

ROOT = Path(__file__).parents[1]
PROGRAM = ("training", "shards", *TASKS)
"""The packages whose code all ranks need to have alike."""
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
    if (promised := _number(variables.WORLD_SIZE, ranks.world)) != ranks.world:
        raise WorldError(
            f"{socket.gethostname()}: {promised} ranks were planned, but this rank's world has"
            f" {ranks.world}: the hosts did not find each other"
        )
    if ranks.world == 1:
        yield ranks
        return
    dist.init_process_group(**_backend(ranks))
    # The first exchange: what is not equal now shows in no later one.
    _check_fingerprints(ranks.gather(_fingerprint(config)))
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


def _fingerprint(config: DeviceSettings) -> bytes:
    run = hashlib.sha256(os.environ.get(variables.RUN_ID, "").encode()).digest()
    same = sorted(item for item in vars(config).items() if item[0] not in OF_A_HOST)
    settings = hashlib.sha256(repr(same).encode()).digest()
    return run + _code_digest() + settings


def _check_fingerprints(by_rank: Sequence[bytes]) -> None:
    for rank, fingerprint in enumerate(by_rank):
        if fingerprint[:32] != by_rank[0][:32]:
            raise WorldError(
                f"rank {rank} belongs to another run than rank 0: two launches share a port;"
                " type the same command again"
            )
        if fingerprint[32:64] != by_rank[0][32:64]:
            raise UnlikeRanks(
                f"the code of rank {rank} is not that of rank 0: copy the same code to every host,"
                " as --sync does"
            )
        if fingerprint[64:] != by_rank[0][64:]:
            raise UnlikeRanks(
                f"the settings of rank {rank} are not those of rank 0: start every rank with the"
                " same options"
            )


def _number(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


@cache
def _code_digest() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(path for name in PROGRAM for path in (ROOT / name).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.digest()
