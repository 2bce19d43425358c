"""Give every block of a data set a home among the hosts of a run.

Every host computes the same homes from the manifest and the names of the hosts, by rendezvous
hashing (Thaler and Ravishankar, 1998) with a limit: a block's home is the host with the highest
score for it that is not full. So homes do not depend on seed, epoch or run: another run on these
hosts finds what the first one has read, and a host that comes or goes moves only its own share.
(Homes by first use, as an order known ahead allows, would be others in every epoch and run.) The
limit evens out the shares, which by chance would differ by a tenth with 100 blocks on each host.

    scores -> each block goes to the best host -> a full host keeps its best -> the rest go on

Where all hosts together cannot hold the data, some blocks have no home: the same ones in every
epoch, so that the others stay.
"""

import hashlib
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from rackrun.shards.index import Shard

Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

NOWHERE = -1
UNEVENNESS = 1.02  # of the fullest host, of the mean
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def homes(
    hosts: Sequence[str], shards: Collection[Shard], cell_bytes: int, limit_bytes: int
) -> dict[str, npt.NDArray[np.int16]]:
    """Return, by the digest of a shard, the number of the host for each `cell_bytes` of it.

    `shards` have different digests. No host is home to more than `limit_bytes`; a cell may have no
    home (NOWHERE).
    """
    counts = [-(-shard.bytes // cell_bytes) for shard in shards]
    cells, sizes = _cells(shards, counts, cell_bytes)
    even_bytes = int(sizes.sum() * UNEVENNESS) // max(len(hosts), 1) + cell_bytes
    digests = (hashlib.sha256(host.encode()).digest() for host in hosts)
    host_hashes = [np.uint64(int.from_bytes(digest[:8], "little")) for digest in digests]
    placement = _placed(cells, sizes, host_hashes, min(even_bytes, limit_bytes))
    by_shard = np.split(placement, np.cumsum(counts)[:-1])
    return {shard.sha256: cells for shard, cells in zip(shards, by_shard, strict=True)}


def _cells(
    shards: Collection[Shard], counts: Sequence[int], cell_bytes: int
) -> tuple[Hashes, Numbers]:
    """Return a hash for each cell, and its bytes."""
    shard_hashes = np.array([int(shard.sha256[:16], 16) for shard in shards], np.uint64).repeat(
        counts
    )
    firsts = np.cumsum([0, *counts])
    number = np.arange(firsts[-1]) - firsts[:-1].repeat(counts)
    totals = np.array([shard.bytes for shard in shards], np.int64).repeat(counts)
    sizes = np.minimum(totals - number * cell_bytes, cell_bytes)
    return _mixed(shard_hashes + number.astype(np.uint64) * _GOLDEN), sizes


def _placed(
    cells: Hashes, sizes: Numbers, hosts: Sequence[np.uint64], capacity: int
) -> npt.NDArray[np.int16]:
    """Return the host of each cell: its best one that is not full of better cells."""
    home = np.full(cells.size, NOWHERE, np.int16)
    score = np.full(cells.size, ~np.uint64(0))
    moving = np.arange(cells.size)
    while moving.size:
        home[moving], score[moving] = _next_best(cells[moving], hosts, score[moving])
        order = np.lexsort((~score, home))  # the best cells of each host first
        ends = sizes[order].cumsum()
        begins = np.searchsorted(home[order], home[order])
        held = ends - np.concatenate([[0], ends])[begins]
        moving = order[(held > capacity) & (home[order] != NOWHERE)]
    return home


def _next_best(
    cells: Hashes, hosts: Sequence[np.uint64], below: Hashes
) -> tuple[npt.NDArray[np.int16], Hashes]:
    """Return the hosts with the highest scores below these, and the scores."""
    best, home = np.zeros(cells.size, np.uint64), np.full(cells.size, NOWHERE, np.int16)
    for number, host in enumerate(hosts):
        score = _mixed(cells ^ host)
        better = (score < below) & (score > best)
        best[better], home[better] = score[better], number
    return home, best


def _mixed(hashes: Hashes) -> Hashes:
    """Return hashes of which every bit depends on every bit of these (splitmix64's last step)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))
