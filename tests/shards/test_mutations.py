"""Whatever is done to a shard or an answer: the same samples, or an error that names the place."""

import multiprocessing
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rackrun.errors import DataError
from rackrun.shards.http_source import HttpSource, Timeouts
from rackrun.shards.samples import samples
from tests.lab.data import Tiny
from tests.shards.mutations import Mutation, corpus, lab

FORK = multiprocessing.get_context("fork")
SHORT = Timeouts(connect_seconds=1, stall_seconds=0.2, total_seconds=0.5, first_seconds=0.5)
HANG_SECONDS = 10
RIGHT, NAMED, NAMELESS, HANGS, SILENT = "right", "named", "nameless", "hangs", "SILENT"


def judge(url: str, tiny: Tiny) -> str:
    """Return what comes of reading everything."""
    source = HttpSource(url, SHORT)
    try:
        with at_most(HANG_SECONDS):
            result = [each for number in range(3) for each in samples(source, "train", number)]
    except HungError:
        return HANGS
    except DataError as error:
        return NAMED if "tiny-train" in str(error) or "dataset.json" in str(error) else NAMELESS
    return RIGHT if result == tiny.all else SILENT


class HungError(BaseException):
    """The time for a mutation is up."""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise HungError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcomes(mutations: list[Mutation]) -> Counter[str]:
    """Count what comes of each, in four labs at once: most of the time is spent waiting."""
    with FORK.Pool(4) as pool:
        return sum(pool.map(in_one_lab, (mutations[n::4] for n in range(4))), Counter[str]())


def in_one_lab(mutations: list[Mutation]) -> Counter[str]:
    result = Counter[str]()
    with lab() as this_lab:
        for mutation in mutations:
            with this_lab.spoilt(mutation) as url:
                result[judge(url, this_lab.tiny)] += 1
    return result


@pytest.mark.security("DATA-4")
def test_no_mutation_gets_through():
    """500 of them: each is detected with its place, or costs nothing; none is silent."""
    result = outcomes(corpus())
    assert result.keys() == {RIGHT, NAMED} and result.total() == 500, result
