"""Measured throughput over hosts, and what other networks would make of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from rackrun.shapes import Between

FURTHEST = 64  # hosts to predict for, at least

Some: TypeAlias = Annotated[int, Between(1, 2**31)]

Seconds: TypeAlias = Annotated[float, Between(-1e9, 1e9)]


@dataclass(frozen=True)
class Point:
    """Measurement with a number of hosts; times in seconds, of the slowest rank."""

    hosts: Some
    ranks: Some
    images: Some  # per rank and step
    step: Annotated[float, Between(1e-9, 1e9)]
    backward: Seconds
    exchange: Seconds  # what it adds to a step
    sending: Seconds  # what it takes alone; 0: not measured
    sent_bytes: Annotated[int, Between(0, 2**53)]  # per rank and step; 0: no plain sum of gradients

    @property
    def rate(self) -> float:
        """Images per second, all ranks together."""
        return self.images * self.ranks / self.step

    @property
    def hidden(self) -> float:
        """The share of the exchange that adds nothing to a step."""
        return min(max(1 - self.exchange / self.sending, 0.0), 1.0) if self.sending else 0.0

    @property
    def gigabits(self) -> float:
        """Speed of the network as the exchange of gradients sees it, in Gbit/s each way."""
        return ring_bits(self.sent_bytes, self.ranks) / self.sending / 1e9 if self.sending else 0.0


@dataclass(frozen=True)
class Curve:
    """The measured points, the fewest hosts first, and what follows from them."""

    points: tuple[Point, ...]

    def efficiency(self, point: Point) -> float:
        """Speed of a rank against a rank of the smallest run."""
        return (point.rate / point.ranks) / (self.points[0].rate / self.points[0].ranks)

    @property
    def predicts(self) -> bool:
        """Return True when the measurement allows predictions for other networks."""
        return bool(self.points[-1].sent_bytes)

    def predicted(self, hosts: int, gigabits: float) -> float:
        """Return the efficiency on that many hosts, on a network of that many Gbit/s each way."""
        first, last = self.points[0], self.points[-1]
        ranks = hosts * last.ranks // last.hosts
        exchange = ring_bits(last.sent_bytes, ranks) / (gigabits * 1e9) if hosts > 1 else 0.0
        added = max(exchange * (1 - last.hidden), exchange - first.backward, 0.0)
        return first.step / (first.step - first.exchange + added)

    @property
    def hosts(self) -> list[int]:
        """Return the numbers of hosts to predict for."""
        doubled = [2]
        while doubled[-1] < max(FURTHEST, self.points[-1].hosts):
            doubled.append(2 * doubled[-1])
        return doubled


def ring_bits(size: int, ranks: int) -> float:
    """Return the bits that each link carries, each way, in a ring all-reduce."""
    return 8 * size * 2 * (ranks - 1) / ranks
