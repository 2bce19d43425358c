"""What hosts and GPUs really do, for `./run-ssh HOSTS --check --deep`: a table, and who is slow.

    links    each two hosts exchange blocks, all pairs of a round at the same time
    network  all ranks reduce a block together
    compute  each rank multiplies matrices
    data     the first rank of each host reads the shards

Every part takes --seconds; with many hosts the rounds of the links share a minute. On GPUs all of
it goes over NCCL.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from rackrun.commandline.parser import parse
from rackrun.data_location import are_plain_tars, expanded, parts_of
from rackrun.shards.open import open_source
from rackrun.shards.source import Stored
from rackrun.shards.tar_streams import opened
from rackrun.training.config import Config
from rackrun.training.device import set_up
from rackrun.training.ranks import Ranks
from rackrun.training.world import joined

READ_BYTES = 4 << 20
BLOCK = {"cuda": 1 << 26, "cpu": 1 << 20}  # bytes
LINKS_SECONDS = 60.0  # of all rounds together
MATRIX = {"cuda": 8192, "cpu": 1024}
SLOW = 0.5  # of the median of all: less is named

Pair = tuple[int, int]


@dataclass(frozen=True)
class DeepCheck:
    """Measure links, network, computation and data of all hosts."""

    hosts: str = ""
    """Names of the hosts, in node rank order, comma-separated."""
    data: str = ""
    """Folder or URL of the shards to read; none: no data are read."""
    device: str = "auto"
    """Device to compute on: auto, cpu or cuda."""
    seconds: float = 5.0
    """Time of each part."""


@dataclass(frozen=True)
class Measured:
    """All measurements, by host, or by host and local rank."""

    links: Mapping[Pair, float] = field(default_factory=dict)  # Gbit/s
    network: float = 0.0  # Gbit/s
    compute: Mapping[Pair, float] = field(default_factory=dict)  # TFLOP/s
    data: Mapping[int, float] = field(default_factory=dict)  # MB/s


def main(args: Sequence[str]) -> int:
    """Measure as one rank of all; the first one prints the report."""
    options = parse(DeepCheck, "deep_check", list(args))
    config = Config(device=options.device)  # type: ignore[arg-type]
    with joined(config) as ranks:
        measurements = measured(config, ranks, options)
        if ranks.first:
            sys.stdout.write("\n".join(report(measurements, options.hosts.split(","))) + "\n")
            sys.stdout.flush()
    return 0


def measured(config: Config, ranks: Ranks, options: DeepCheck) -> Measured:
    """Return what all ranks measure together."""
    node = int(os.environ.get("GROUP_RANK", ranks.rank // ranks.local_world))
    host_and_local_rank = [
        (int(host), int(local)) for host, local in _all(ranks, [node, ranks.local_rank])
    ]
    firsts = {host: rank for rank, (host, local) in enumerate(host_and_local_rank) if local == 0}
    of_links = links(ranks, firsts, options.seconds)
    together = network(ranks, options.seconds)
    speeds = _all(ranks, [compute(config, ranks, options.seconds)])
    reads = ranks.local_rank == 0 and bool(options.data)
    rates = _all(ranks, [reading(options.data, node, options.seconds) if reads else 0.0])
    return Measured(
        links={
            (int(first), int(second)): rate
            for row in _all(ranks, of_links)
            for first, second, rate in zip(row[::3], row[1::3], row[2::3], strict=True)
        },
        network=together,
        compute={where: rate for where, (rate,) in zip(host_and_local_rank, speeds, strict=True)},
        data={host: rates[rank][0] for host, rank in firsts.items() if rates[rank][0]},
    )


def links(ranks: Ranks, firsts: Mapping[int, int], seconds: float) -> list[float]:
    """Return host, host and Gbit/s each way of every link that this rank has measured, in a row."""
    measured_links: list[float] = []
    every = list(rounds(len(firsts)))
    shared = LINKS_SECONDS / max(len(every), 1)
    host = next((host for host, rank in firsts.items() if rank == ranks.rank), None)
    for pairs in every:
        ranks.all_reduce_max(0)  # all begin together
        for first, second in pairs:
            if host in (first, second):
                other = firsts[second if host == first else first]
                rate = _exchange(ranks, other, host == first, min(seconds, shared))
                measured_links += [first, second, rate] if host == first else []
    return measured_links


def rounds(hosts: int) -> Iterator[list[Pair]]:
    """Yield pairs in rounds: each two hosts meet once, and a host is in one pair of a round."""
    circle = list(range(hosts + hosts % 2))  # one more means a pause
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        met = zip(circle[:half], circle[: half - 1 : -1], strict=True)
        yield [(min(pair), max(pair)) for pair in met if max(pair) < hosts]
        circle.insert(1, circle.pop())


def network(ranks: Ranks, seconds: float) -> float:
    """Return Gbit/s of each rank, each way, while all of them reduce blocks together."""
    if ranks.world == 1:
        return 0.0

    def reduce(block: torch.Tensor) -> int:
        dist.all_reduce(block, dist.ReduceOp.MAX)
        return int(block[0])

    return _rate(ranks, reduce, ranks.first, seconds) * 2 * (ranks.world - 1) / ranks.world


def _exchange(ranks: Ranks, other: int, leads: bool, seconds: float) -> float:
    received = torch.zeros(BLOCK[ranks.device.type], dtype=torch.uint8, device=ranks.device)

    def exchange(block: torch.Tensor) -> int:
        ways = [dist.P2POp(dist.isend, block, other), dist.P2POp(dist.irecv, received, other)]
        for work in dist.batch_isend_irecv(ways):
            work.wait()
        return int(block[0] if leads else received[0])

    return _rate(ranks, exchange, leads, seconds)


def _rate(
    ranks: Ranks, exchange: Callable[[torch.Tensor], int], leads: bool, seconds: float
) -> float:
    # One rank of an exchange leads, and says in the first byte of a block that it is the last one:
    # clocks differ, and all must stop after the same one.
    block = torch.zeros(BLOCK[ranks.device.type], dtype=torch.uint8, device=ranks.device)
    exchange(block)  # connects, and is not timed
    began, sent, is_last = time.perf_counter(), 0, 0
    while not is_last:
        block[0] = leads and time.perf_counter() > began + seconds
        is_last = exchange(block)  # waits for the device: the answer is a number
        sent += len(block)
    return 8e-9 * sent / (time.perf_counter() - began)


def compute(config: Config, ranks: Ranks, seconds: float) -> float:
    """Return TFLOP/s of this rank in products of matrices, as precise as training."""
    how = set_up(config, ranks)
    size = MATRIX[ranks.device.type]
    kind = how.autocast_dtype or torch.float32
    matrix = torch.randn(size, size, dtype=kind, device=ranks.device)
    for _ in range(2):
        float((matrix @ matrix)[0, 0])  # the first product loads libraries
    began, products = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        float((matrix @ matrix)[0, 0])  # waits for the device
        products += 1
    return 2e-12 * size**3 * products / (time.perf_counter() - began)


def reading(data: str, host: int, seconds: float) -> float:
    """Return MB/s at which shards come; each host begins at another one."""
    began, taken = time.perf_counter(), 0
    blocks = _plain_blocks(data, host) if are_plain_tars(data) else _blocks(data, host)
    with closing(blocks):
        for block in blocks:
            taken += len(block)
            if time.perf_counter() > began + seconds:
                break
    return taken / 1e6 / (time.perf_counter() - began)


def _blocks(data: str, host: int) -> Generator[Stored]:
    sources = map(open_source, parts_of(data))
    shards = [(s, each) for s in sources for split in s.manifest.splits for each in split.shards]
    for number in range(len(shards)):
        source, shard = shards[(host + number) % len(shards)]
        yield from source.stream(shard)


def _plain_blocks(data: str, host: int) -> Generator[Stored]:
    tars = expanded(data)
    for number in range(len(tars)):
        with opened(tars[(host + number) % len(tars)]) as stream:
            while block := stream.read(READ_BYTES):
                yield block


def report(measurements: Measured, hosts: Sequence[str]) -> list[str]:
    """Return a line per kind with its range, and one for all that is slow."""

    def name(host: int) -> str:
        return hosts[host] if host < len(hosts) and hosts[host] else f"node {host}"

    def rank_name(where: Pair) -> str:
        return f"rank {where[1]} of {name(where[0])}"

    between, together = measurements.links, {0: measurements.network}
    compute, data = measurements.compute, measurements.data
    kinds: tuple[tuple[str, str, Mapping[Any, float], list[str]], ...] = (
        ("links", "Gbit/s each way between two hosts", between, slow_links(between, name)),
        ("network", "Gbit/s of each rank, all together", together, []),
        ("compute", "TFLOP/s of each rank", compute, slow(compute, rank_name, "TFLOP/s")),
        ("data", "MB/s on each host", data, slow(data, name, "MB/s")),
    )
    lines, named = [], []
    for kind, unit, rates, late in kinds:
        if any(rates.values()):
            least, most = min(rates.values()), max(rates.values())
            span = f"{least:.3g}" if most == least else f"{least:.3g} to {most:.3g}"
            lines.append(f"{kind:8} {span:>16} {unit}")
        named += [f"slow {kind}: {line}" for line in late]
    return [*lines, *(named or ["nothing is slower than half of the others"])]


def slow_links(rates: Mapping[Pair, float], name: Callable[[int], str]) -> list[str]:
    """Return hosts whose links are all slow, then slow links between two other hosts."""
    if len(rates) < 3:  # of two hosts neither end is to blame
        return []
    usual = statistics.median(rates.values())
    hosts = sorted({host for pair in rates for host in pair})
    best = {host: max(rate for pair, rate in rates.items() if host in pair) for host in hosts}
    ends = {host for host in hosts if best[host] < SLOW * statistics.median_high(best.values())}
    lines = [f"{name(host)}, {best[host]:.3g} Gbit/s at best" for host in sorted(ends)]
    return lines + [
        f"{name(first)} and {name(second)}, {rate:.3g} Gbit/s, usual {usual:.3g}"
        for (first, second), rate in sorted(rates.items())
        if rate < SLOW * usual and not ends & {first, second}
    ]


def slow(rates: Mapping[Any, float], name: Callable[[Any], str], unit: str) -> list[str]:
    """Return what is slower than half of the median."""
    usual = statistics.median(rates.values()) if rates else 0.0
    return [
        f"{name(where)}, {rate:.3g} {unit}, usual {usual:.3g}"
        for where, rate in sorted(rates.items())
        if rate < SLOW * usual
    ]


def _all(ranks: Ranks, numbers: Sequence[float]) -> list[list[float]]:
    return [json.loads(row) for row in ranks.gather(json.dumps(list(numbers)).encode())]
