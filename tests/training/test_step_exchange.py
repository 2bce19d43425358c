"""When ranks follow a request: all after the same step, and without a wait in their steps."""

from collections.abc import Callable, Iterator
from random import Random
from typing import cast

import pytest

from rackrun.training.ranks import Ranks
from rackrun.training.stop_requests import NOTHING, SAVE
from rackrun.training.sync.step_exchange import RECENT, StepExchange

STOP = 143
WORLD = 5

Requests = Callable[[int, int], int]
"""The request that is pending on a rank at a step."""


class Network:
    """Ranks in the same step, each of which has the result of an exchange some steps later."""

    def __init__(self, duration: Callable[[int, int], int], world: int = WORLD) -> None:
        self.duration = duration  # in steps, by rank and step
        self.world = world
        self.step = 0
        self.waits: list[int] = []  # steps in which a rank had to wait
        self._sent: list[list[tuple[int, ...]]] = []  # by exchange: what each rank gave

    def requests_followed(self, steps: int, pending: Requests) -> Iterator[int]:
        """Yield the request that all ranks follow after each step."""
        ranks = [SimulatedRank(self, rank) for rank in range(self.world)]
        exchanges = [
            StepExchange(cast(Ranks, each), lambda rank=rank: pending(rank, self.step))
            for rank, each in enumerate(ranks)
        ]
        for self.step in range(steps):
            for exchange in exchanges:
                exchange.begin()
            for exchange in exchanges:
                exchange.complete()
            (request,) = {exchange.request for exchange in exchanges}
            yield request

    def send(self, exchange: int, numbers: tuple[int, ...]) -> None:
        """Take what a rank gives to an exchange."""
        if exchange == len(self._sent):
            self._sent.append([])
        self._sent[exchange].append(numbers)

    def largest(self, exchange: int) -> list[int]:
        """Return the result of an exchange, to which all ranks must have given something."""
        assert len(self._sent[exchange]) == self.world
        return [max(numbers) for numbers in zip(*self._sent[exchange], strict=True)]


class SimulatedRank:
    """A rank, as far as a StepExchange asks for one."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network = network
        self.world = network.world
        self._rank = rank
        self._exchanges = 0

    def all_reduce_max_later(self, *numbers: int) -> "SimulatedMax":
        """Begin an exchange."""
        network, exchange = self._network, self._exchanges
        self._exchanges += 1
        network.send(exchange, numbers)
        return SimulatedMax(
            network, exchange, network.step + network.duration(self._rank, network.step)
        )


class SimulatedMax:
    """An exchange under way."""

    def __init__(self, network: Network, exchange: int, due: int) -> None:
        self._network, self._exchange, self._due = network, exchange, due

    @property
    def is_complete(self) -> bool:
        """Return whether its steps are over."""
        return self._network.step >= self._due

    def wait(self) -> list[int]:
        """Return the result; note the step if it is not there yet."""
        if not self.is_complete:
            self._network.waits.append(self._network.step)
        return self._network.largest(self._exchange)


@pytest.mark.parametrize("seed", range(20))
def test_all_ranks_follow_requests_after_the_same_step(seed):
    """However long exchanges take on each rank, and whoever has a request; none is lost."""
    random = Random(seed)
    slowest = random.choice((0, 1, 3, 40))
    world = 2 + seed % 4
    network = Network(lambda rank, step: random.randint(0, slowest), world)
    arriving = {random.randrange(1200): random.choice((SAVE, STOP)) for _ in range(6)}
    pending = [NOTHING] * world
    asked, followed = 0, 0
    for request in network.requests_followed(1500, lambda rank, step, now=pending: now[rank]):
        if request:
            followed = max(followed, request)
            pending[:] = [NOTHING] * world
        if new := arriving.get(network.step):
            pending[random.randrange(world)] = new
            asked = max(asked, new)
    assert followed == asked


@pytest.mark.parametrize("steps", [0, 1, 7, 100])
def test_no_step_waits_once_the_duration_of_exchanges_is_known(steps):
    """The lag doubles until it is long enough, and stays, although some ranks are faster."""
    network = Network(lambda rank, step: steps // (1 + rank % 2))
    for _ in network.requests_followed(3000, lambda rank, step: NOTHING):
        pass
    assert len(network.waits) <= WORLD * 14
    assert all(step <= 4 * steps for step in network.waits)


@pytest.mark.parametrize("steps", [0, 3, 25])
def test_a_request_is_followed_soon(steps):
    """After two exchanges at most, each of which is read after twice the steps that it takes."""
    network = Network(lambda rank, step: steps)
    pending: Requests = lambda rank, step: STOP * (rank == 2 and step >= 500)  # noqa: E731
    first = next(
        network.step for request in network.requests_followed(1000, pending) if request == STOP
    )
    assert 500 <= first <= 500 + 4 * steps + 1


def test_requests_are_followed_in_their_own_step_when_exchanges_are_fast_again():
    """A slow network is remembered for some exchanges only."""
    network = Network(lambda rank, step: 10 if 100 <= step < 200 else 0)
    begun = 200 + 21 * (RECENT + 2)
    pending: Requests = lambda rank, step: STOP * (step == begun)  # noqa: E731
    requests = list(network.requests_followed(begun + 1, pending))
    assert requests[-1] == STOP and not any(requests[:-1])
