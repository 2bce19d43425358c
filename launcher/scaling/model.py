"""Measured throughput over hosts, and what other networks would make of it.

Every number comes with its spread: each size is measured in several windows of a few steps, and
nothing is concluded from a difference that is smaller than that between two windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add
from statistics import median
from typing import Annotated, NamedTuple, TypeAlias

from rackrun.shapes import AtMost, Between

FURTHEST = 64  # hosts to predict for, at least
GIGABITS = (1, 10, 25, 100, 400)  # networks to predict for, per host and direction
WINDOWED = ("steps", "forward", "local", "together", "sending")
TOLERATED = 0.2  # of an efficiency: the widest range that is a prediction still

Some: TypeAlias = Annotated[int, Between(1, 2**31)]
Durations: TypeAlias = Annotated[tuple[Annotated[float, Between(0, 1e9)], ...], AtMost(8)]
Steps: TypeAlias = Annotated[tuple[Annotated[float, Between(1e-9, 1e9)], ...], AtMost(8)]


class Spread(NamedTuple):
    """The least, the median and the greatest of a number that was measured several times."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class Point:
    """Measurement with a number of hosts; seconds by window, of the slowest rank."""

    hosts: Some
    ranks: Some
    images: Some  # per rank and step
    steps: Steps
    forward: Durations
    local: Durations  # forward and backward without an exchange of gradients
    together: Durations  # forward and backward with it
    sending: Durations  # what the exchange takes alone; 0: not measured
    sent_bytes: Annotated[int, Between(0, 2**53)]  # per rank and step; 0: no plain sum of gradients

    def plus(self, other: Point) -> Point:
        """Return this measurement with the windows of another run of the same size."""
        both = map(add, self.windows, other.windows)
        return replace(self, **dict(zip(WINDOWED, both, strict=True)))

    @property
    def windows(self) -> list[tuple[float, ...]]:
        """Return what differs by window, the fields of `WINDOWED` in their order."""
        return [getattr(self, name) for name in WINDOWED]

    @property
    def step(self) -> Spread:
        """Seconds of a step."""
        return spread(self.steps)

    @property
    def rate(self) -> Spread:
        """Images per second, all ranks together."""
        return spread([self.images * self.ranks / seconds for seconds in self.steps])

    @property
    def backward(self) -> Spread:
        """Seconds of the part of a step that can hide an exchange."""
        return _difference(spread(self.local), spread(self.forward))

    @property
    def exchange(self) -> Spread:
        """Seconds that the exchange adds to a step."""
        if self.ranks == 1:
            return Spread(0.0, 0.0, 0.0)
        return _difference(spread(self.together), spread(self.local))

    @property
    def hidden(self) -> Spread:
        """The share of the exchange that adds nothing to a step."""
        added, alone = self.exchange, spread(self.sending)
        if not alone.low:
            return Spread(0.0, 0.0, 0.0)
        shares = (added.high / alone.low, added.middle / alone.middle, added.low / alone.high)
        return Spread(*(max(1 - share, 0.0) for share in shares))

    @property
    def gigabits(self) -> float:
        """Speed of the network as the exchange of gradients sees it, in Gbit/s each way."""
        alone = median(self.sending)
        return ring_bits(self.sent_bytes, self.ranks) / alone / 1e9 if alone else 0.0


@dataclass(frozen=True)
class Curve:
    """The measured points, the fewest hosts first, and what follows from them."""

    points: tuple[Point, ...]

    def efficiency(self, point: Point) -> Spread:
        """Return the speed of a rank over that of a rank of the smallest run."""
        first = self.points[0]
        if point is first:
            return Spread(1.0, 1.0, 1.0)
        ranks = point.ranks / first.ranks
        own, least = point.rate, first.rate
        return Spread(
            own.low / least.high / ranks,
            own.middle / least.middle / ranks,
            own.high / least.low / ranks,
        )

    @property
    def predicts(self) -> bool:
        """Return True when the measurement allows predictions for other networks."""
        return bool(self.points[-1].sent_bytes)

    @property
    def doubt(self) -> float:
        """Return the widest range of any predicted efficiency."""
        ranges = [self.predicted(hosts, speed) for hosts in self.hosts for speed in GIGABITS]
        return max(one.high - one.low for one in ranges)

    def predicted(self, hosts: int, gigabits: float) -> Spread:
        """Return the efficiency on that many hosts, on a network of that many Gbit/s each way."""
        first, last = self.points[0], self.points[-1]
        ranks = hosts * last.ranks // last.hosts
        exchange = ring_bits(last.sent_bytes, ranks) / (gigabits * 1e9) if hosts > 1 else 0.0
        # Efficiency rises with each of the four, so that all the lowest give the lowest.
        parts = zip(first.step, first.exchange, first.backward, last.hidden, strict=True)
        return Spread(*(_predicted(exchange, *values) for values in parts))

    @property
    def hosts(self) -> list[int]:
        """Return the numbers of hosts to predict for."""
        doubled = [2]
        while doubled[-1] < max(FURTHEST, self.points[-1].hosts):
            doubled.append(2 * doubled[-1])
        return doubled


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of the values of all windows."""
    return Spread(min(values), median(values), max(values))


def ring_bits(size: int, ranks: int) -> float:
    """Return the bits that each link carries, each way, in a ring all-reduce."""
    return 8 * size * 2 * (ranks - 1) / ranks


def _difference(one: Spread, other: Spread) -> Spread:
    lows_and_highs = (one.low - other.high, one.middle - other.middle, one.high - other.low)
    return Spread(*(max(value, 0.0) for value in lows_and_highs))


def _predicted(exchange: float, step: float, own: float, backward: float, hidden: float) -> float:
    """Return an efficiency; `own` is the exchange of the smallest run, which the ring still has."""
    added = max(exchange * (1 - hidden), exchange - backward, own)
    return step / (step - own + added)
