"""Whatever is done to a shard or an answer: the same samples, or an error that names the place."""

import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice

import numpy as np
import pytest

from rackrun.errors import DataError
from rackrun.shards.http_source import HttpSource, Timeouts
from rackrun.shards.samples import Sample, samples
from rackrun.shards.source import Source
from rackrun.training.data.pool import SamplePool
from rackrun.training.data.resampled import drawn, samples_of_shard
from rackrun.training.data.samples import StoredSample
from tests.lab.data import Tiny
from tests.shards.mutations import Mutation, corpus, lab

FORK = multiprocessing.get_context("fork")
SHORT = Timeouts(connect_seconds=1, stall_seconds=0.2, total_seconds=0.5, first_seconds=0.5)
HANG_SECONDS = 10
Read = Callable[[Source, Tiny], bool]
"""Reads everything; returns whether it is right."""
RIGHT, NAMED, NAMELESS, HANGS, SILENT = "right", "named", "nameless", "hangs", "SILENT"


def shard_by_shard(source: Source, tiny: Tiny) -> bool:
    """Read as `rackrun.samples` does; return whether that gives the samples, in order."""
    return [each for number in range(3) for each in samples(source, "train", number)] == tiny.all


def exact(source: Source, tiny: Tiny) -> bool:
    """Read as a rank reads the batches of an exact epoch."""
    pool = SamplePool((source,))
    order = np.random.default_rng(0).permutation(pool.size)
    batches = [np.sort(order[first : first + 4]) for first in range(0, pool.size, 4)]
    return all(
        whole(stored) == tiny.all[row]
        for rows in batches
        for row, stored in zip(rows, pool.samples(rows), strict=True)
    )


def resampled(source: Source, tiny: Tiny) -> bool:
    """Read as a loader worker reads drawn shards: it meets all samples, and no others."""
    names = [shard.name for shard in source.manifest.split("train").shards]
    stream = drawn(names, partial(samples_of_shard, source), 20, (0, 0, 0), 0, 1)
    met = [whole(stored) for stored in islice(stream, 8 * len(tiny.all))]
    return all(each in tiny.all for each in met) and all(each in met for each in tiny.all)


def whole(stored: StoredSample) -> Sample:
    """Return a sample, or raise what is wrong with it, as what decodes it does."""
    if stored.sample.fault:
        raise stored.sample.fault
    return stored.sample


def judge(url: str, tiny: Tiny, read: Read) -> str:
    """Return what comes of reading everything."""
    try:
        with at_most(HANG_SECONDS):
            is_right = read(HttpSource(url, SHORT), tiny)
    except HungError:
        return HANGS
    except DataError as error:
        return NAMED if "tiny-train" in str(error) or "dataset.json" in str(error) else NAMELESS
    return RIGHT if is_right else SILENT


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


def outcomes(mutations: list[Mutation], read: Read) -> Counter[str]:
    """Count what comes of each, in four labs at once: most of the time is spent waiting."""
    with FORK.Pool(4) as pool:
        parts = [(mutations[n::4], read) for n in range(4)]
        return sum(pool.starmap(in_one_lab, parts), Counter[str]())


def in_one_lab(mutations: list[Mutation], read: Read) -> Counter[str]:
    result = Counter[str]()
    with lab() as this_lab:
        for mutation in mutations:
            with this_lab.spoilt(mutation) as url:
                result[judge(url, this_lab.tiny, read)] += 1
    return result


@pytest.mark.security("DATA-4")
@pytest.mark.parametrize("read", [shard_by_shard, exact, resampled])
def test_no_mutation_gets_through(read):
    """500 of them: each is detected with its place, or costs nothing; none is silent."""
    result = outcomes(corpus(), read)
    assert result.keys() == {RIGHT, NAMED} and result.total() == 500, result
