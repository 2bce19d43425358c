"""Whose network is slow, once all ranks wait for it.

Gradients are complete everywhere at the same moment, so step times do not show whose link is
slow. One rank of every host therefore sends a block to its neighbour in the circle of hosts, and
then one to the neighbour on the other side:

    A -> B -> C -> A        A <- B <- C <- A

Of a host that sends slowly both blocks arrive late; a host that receives slowly gets both late. Two
hosts have one link, of which neither end can be blamed. The blocks go over the network of gloo:
where a host has InfiniBand, which gradients may take, nothing is measured.
"""

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from training.ranks import Ranks

MOST_BYTES = 1 << 20  # of a block, which is no larger than a step's gradients
TRIES = 2  # of which the best counts
LEAST_HOSTS = 3
WORTH_NAMING = 2.0  # times slower than the others
FAST_NETWORKS = Path("/sys/class/infiniband")

Seconds = npt.NDArray[np.float64]


class SlowLink(NamedTuple):
    """The host with the slowest link, by its first rank."""

    rank: int
    times: float  # slower than the others' median


def slowest_link(ranks: Ranks, sent_bytes: int) -> SlowLink | None:
    """Return the slowest link in an exchange of that many bytes, if any; all ranks call it."""
    about = np.array([ranks.local_rank, FAST_NETWORKS.exists() and any(FAST_NETWORKS.iterdir())])
    ranks_about = ranks.all_gather(about.astype(np.int64))
    firsts = [rank for rank, (local, _) in enumerate(ranks_about) if local == 0]
    if len(firsts) < LEAST_HOSTS or any(fast for _, fast in ranks_about):
        return None
    block = torch.zeros(min(MOST_BYTES, sent_bytes), dtype=torch.uint8)
    ways = [min(_received(ranks, firsts, block, way) for _ in range(TRIES)) for way in (1, -1)]
    times_by_rank = ranks.all_gather(np.rint(np.array(ways) * 1e9).astype(np.int64))
    slowest = slowest_host(np.stack([times_by_rank[rank] for rank in firsts]) / 1e9)
    return SlowLink(firsts[slowest.rank], slowest.times) if slowest.times >= WORTH_NAMING else None


def _received(ranks: Ranks, firsts: list[int], block: torch.Tensor, way: int) -> float:
    """Return the seconds until the neighbour's block is here; 0 on a rank that takes no part."""
    ranks.all_reduce_max(0)  # all begin together
    if ranks.rank not in firsts:
        return 0.0
    position, began = firsts.index(ranks.rank), time.perf_counter()
    sending = dist.isend(block, firsts[(position + way) % len(firsts)])
    dist.recv(torch.empty_like(block), firsts[(position - way) % len(firsts)])
    seconds = time.perf_counter() - began
    if sending is not None:
        sending.wait()
    return seconds


def slowest_host(times: Seconds) -> SlowLink:
    """Find the slowest host by its place, from (hosts, 2): seconds from the left, from the right.

    A host is as slow as the faster of the two blocks it sent, or of the two that it got.
    """
    sent = np.minimum(np.roll(times[:, 0], -1), np.roll(times[:, 1], 1))
    slow = np.maximum(sent, times.min(axis=1))
    index = int(slow.argmax())
    return SlowLink(index, float(slow[index] / np.median(np.delete(slow, index))))
