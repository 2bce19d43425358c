"""The order of an epoch: every sample once, cut alike for every number of ranks and workers."""

import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.index import INDEX_FIELDS
from training.data import order as orders
from training.data.mixture import mixture
from training.data.order import Order, Part

IMAGENET = 1_281_167


def index_of(lengths: np.ndarray, shards: np.ndarray) -> np.ndarray:
    """An index of samples of these lengths, in these shards."""
    index = np.zeros(lengths.size, INDEX_FIELDS)
    index["shard"], index["length"] = shards, lengths
    ends = np.cumsum(lengths)
    first = np.searchsorted(shards, shards)
    index["offset"] = ends - lengths - (ends - lengths)[first]
    return index


@dataclass(frozen=True)
class Case:
    """A data set and the machines that train on it."""

    lengths: np.ndarray
    shards: np.ndarray
    ranks: int
    workers: int
    batch: int
    seed: int

    @property
    def index(self) -> np.ndarray:
        return index_of(self.lengths, self.shards)

    def order(self, epoch: int = 0) -> Order:
        rows = np.arange(self.lengths.size)
        return orders.shuffled(self.index, rows, self.seed, epoch, self.batch)

    def parts(self, order: Order, start: int = 0) -> list[list[Part]]:
        """By rank, by worker."""
        return [
            [
                orders.part(
                    order, self.index, start, self.batch, rank, self.ranks, worker, self.workers
                )
                for worker in range(self.workers)
            ]
            for rank in range(self.ranks)
        ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    samples = draw(st.integers(1, 3000))
    shard_count = draw(st.integers(1, min(samples, 20)))
    seed = draw(st.integers(0, 2**32))
    random = np.random.default_rng(seed)
    sizes = random.integers(1, draw(st.sampled_from([2, 40, 4000])), samples) * 512
    return Case(
        lengths=sizes,
        shards=np.sort(random.integers(0, shard_count, samples)),
        ranks=draw(st.one_of(st.integers(1, 9), st.sampled_from([16, 60, 64, 100]))),
        workers=draw(st.integers(1, 5)),
        batch=draw(st.one_of(st.integers(1, 40), st.integers(1, 4000))),
        seed=seed,
    )


def steps_of(order: Order, start: int, batch: int) -> list[list[int]]:
    return [order.rows[at : at + batch].tolist() for at in range(start, order.rows.size, batch)]


def dealt(parts: list[list[Part]]) -> list[list[list[int]]]:
    """The rows that the workers of each rank put into its batches: by step, by rank, by place."""
    steps = parts[0][0].ends.size
    batches: list[list[dict[int, int]]] = [[{} for _ in parts] for _ in range(steps)]
    for rank, workers in enumerate(parts):
        for part in workers:
            assert part.ends.size == steps
            numbers = np.searchsorted(part.ends, np.arange(part.rows.size), side="right")
            for row, step, place in zip(part.rows, numbers, part.places, strict=True):
                assert place not in batches[step][rank]
                batches[step][rank][int(place)] = int(row)
    for step in batches:
        assert all(sorted(batch) == list(range(len(batch))) for batch in step)
    return [[[row for _, row in sorted(batch.items())] for batch in step] for step in batches]


@given(cases())
@settings(max_examples=100, deadline=None)
def test_an_epoch_is_the_data_set(case: Case) -> None:
    """Whatever the data set and the machines: each step's samples are those of one rank alone,
    the ranks' parts differ by one at most, and an epoch has every sample exactly once."""
    order = case.order()
    steps = steps_of(order, 0, case.batch)
    assert sorted(row for step in steps for row in step) == list(range(case.lengths.size))
    parts = case.parts(order)
    for rows, by_rank in zip(steps, dealt(parts), strict=True):
        assert Counter(row for part in by_rank for row in part) == Counter(rows)
        sizes = [len(part) for part in by_rank]
        assert max(sizes) - min(sizes) <= 1


@given(cases(), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_the_rest_of_an_epoch_is_what_was_not_yet_trained(case: Case, place: int) -> None:
    """From any position, at any other number of ranks and batch size, the very next samples."""
    order = case.order(epoch=3)
    start = place % case.lengths.size
    rest = dealt(case.parts(order, start))
    for rows, by_rank in zip(steps_of(order, start, case.batch), rest, strict=True):
        assert Counter(row for part in by_rank for row in part) == Counter(rows)


@given(cases())
@settings(max_examples=50, deadline=None)
def test_no_byte_is_read_twice(case: Case) -> None:
    """All reads of an epoch together are the bytes of the samples, none of them twice."""
    times = np.zeros(case.lengths.size, int)
    for part in sum(case.parts(case.order()), []):
        for at, row in zip(part.brought_by, part.rows, strict=True):
            assert 0 <= row - part.reads["row"][at] < part.reads["samples"][at]
        for first, samples in part.reads.tolist():
            times[first : first + samples] += 1
            assert len(set(case.shards[first : first + samples].tolist())) == 1
        first_use = np.unique(part.brought_by, return_index=True)[1]
        assert first_use.size == part.reads.size and (np.diff(first_use) > 0).all()
    assert (times == 1).all()


def test_evening_out_goes_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long epoch is evened out in portions, and these leave no trace in the result."""
    whole = orders.owners(5, 20_000, 13, 960, 7)
    monkeypatch.setattr(orders, "BALANCED_AT_ONCE", 100)
    assert (orders.owners(5, 20_000, 13, 960, 7) == whole).all()


def imagenet() -> np.ndarray:
    """An index like ImageNet's: 140 GB in shards of about 1 GB, classes one after the other."""
    random = np.random.default_rng(0)
    lengths = (random.lognormal(11.4, 0.5, IMAGENET).astype(np.int64) // 512 + 3) * 512
    index = index_of(lengths, np.arange(IMAGENET) // 9000)
    index["label"] = np.arange(IMAGENET) * 1000 // IMAGENET
    return index


@pytest.fixture(scope="module")
def large() -> np.ndarray:
    return imagenet()


def test_planning_imagenet_is_quick_and_small(large: np.ndarray) -> None:
    """A rank plans an epoch of 1,281,167 samples within 1 s (of processor time) and 100 MB."""
    rows = np.arange(IMAGENET)
    begun = time.process_time()
    orders.part(orders.shuffled(large, rows, 0, 1, 256), large, 0, 256, 3, 8, 1, 4)
    seconds = time.process_time() - begun
    tracemalloc.start()
    rows = mixture(large["label"], {}).rows(0)
    orders.part(orders.shuffled(large, rows, 0, 1, 256), large, 0, 256)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 1
    assert peak < 100e6


def test_reads_are_blocks(large: np.ndarray) -> None:
    """Ranks that divide the lanes read 2 MiB at a time; with 7 ranks that is nearly so."""
    order = orders.shuffled(large, np.arange(IMAGENET), 0, 1, 256)
    for ranks, least in ((8, 1.9), (64, 1.9), (7, 1.5), (56, 0.8)):
        part = orders.part(order, large, 0, 4 * ranks, 0, ranks, 0, 2)
        assert large["length"][part.rows].sum() / part.reads.size / 2**20 > least


def clumping(labels: np.ndarray, batch: int) -> float:
    """Variance of the number of samples per class and batch, as a multiple of random batches'."""
    batches = labels[: labels.size // batch * batch].reshape(-1, batch)
    counts = np.stack([np.bincount(part, minlength=1000) for part in batches])
    share = counts.mean()
    return float(((counts - share) ** 2).mean() / share / (1 - 1 / 1000))


@pytest.mark.parametrize("batch", [256, 1024, 2048, 4096, 8192, 16384, 32768])
def test_batches_are_mixed(large: np.ndarray, batch: int) -> None:
    """Even from shards in class order, a batch of any size has as many samples of each class as a
    random one has, and neighbours in a shard meet in a step no more often than in a random one."""
    order = orders.shuffled(large, np.arange(IMAGENET), 0, 1, batch)
    labels = large["label"][order.rows]
    uniform = large["label"][np.random.default_rng(0).permutation(IMAGENET)]
    assert clumping(labels, batch) == pytest.approx(clumping(uniform, batch), rel=0.08)
    assert clumping(np.sort(labels), 256) > 100  # the measure sees what is not mixed
    place = np.argsort(order.rows)
    assert (np.diff(place // batch) == 0).mean() < batch / IMAGENET
    assert np.median(np.abs(np.diff(place))) > 2 * min(batch, 4096)


def test_memory_for_mixing_grows_slower_than_the_batch(large: np.ndarray) -> None:
    """Half of each lane's open block, over all ranks: 1 GiB, and 6 GiB for batches of 32,768."""
    for batch, most in ((256, 1.0), (4096, 2.2), (32768, 6.0)):
        lanes = orders.lane_count(IMAGENET, batch)
        starts = orders.block_starts(large, np.arange(IMAGENET), lanes, phase=0.5)
        block = large["length"].sum(dtype=np.int64) / (starts.size - 1)
        assert lanes % 960 == 0 and lanes >= batch
        assert lanes * block / 2 < most * 2**30


def test_epochs_differ_and_follow_from_the_seed() -> None:
    """The same seed and epoch give the same order, any other numbers another one."""
    index, rows = index_of(np.full(3000, 4096), np.arange(3000) // 100), np.arange(3000)
    order = orders.shuffled(index, rows, 7, 0, 16).rows
    assert (order == orders.shuffled(index, rows, 7, 0, 16).rows).all()
    for seed, epoch in ((7, 1), (8, 0)):
        assert (order == orders.shuffled(index, rows, seed, epoch, 16).rows).mean() < 0.01


def test_the_order_stays_what_it_was() -> None:
    """A run of last year goes on with the same order: these are the numbers of version 0.1."""
    index = index_of(np.full(500, 4096), np.arange(500) // 100)
    order = orders.shuffled(index, np.arange(500), 1, 2, 16)
    assert order.rows[:8].tolist() == [31, 339, 95, 197, 6, 336, 315, 309]


def test_subsets_and_first_samples() -> None:
    """A subset of classes and the first N read only the bytes of their samples."""
    index = index_of(np.full(1000, 2048), np.arange(1000) // 100)
    labels = np.arange(1000) % 10
    rows = mixture(labels, {}, only=frozenset({3, 4}), first=50).rows(0)
    part = orders.part(orders.shuffled(index, rows, 0, 0, 16), index, 0, 16)
    assert sorted(part.rows.tolist()) == sorted(rows.tolist())
    assert set(labels[part.rows]) == {3, 4} and part.rows.max() == 244
    assert part.reads["samples"].sum() == 50


@given(st.dictionaries(st.integers(0, 4), st.floats(0, 3), min_size=1), st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_weights_are_kept_exactly(weights: dict[int, float], samples: int) -> None:
    """Epochs are equally long, and over many of them each sample comes as often as its weight
    says, never twice more often than another of its class."""
    labels = np.arange(samples) % 5
    if not any(round(weights.get(c, 1) * (labels == c).sum()) for c in set(labels.tolist())):
        return
    mixed = mixture(labels, weights)
    counts = np.zeros(samples, int)
    for epoch in range(6):
        rows = mixed.rows(epoch)
        assert rows.size == mixed.samples
        np.add.at(counts, rows, 1)
    for label in set(labels.tolist()):
        seen, size = counts[labels == label], (labels == label).sum()
        assert seen.sum() == 6 * round(weights.get(label, 1) * size)
        assert seen.max() - seen.min() <= 1


def test_copies_of_a_sample_keep_apart() -> None:
    """A class of weight 2 is drawn twice; its copies are in different blocks."""
    index = index_of(np.full(4000, 4096), np.arange(4000) // 500)
    mixed = mixture(np.arange(4000) % 4, {1: 2.0})
    order = orders.shuffled(index, mixed.rows(0), 0, 0, 16)
    assert order.rows.size == 5000
    pairs = set(zip(order.rows.tolist(), order.pieces.tolist(), strict=True))
    assert len(pairs) == 5000


def test_resampled_blocks_are_drawn_evenly() -> None:
    """With replacement: as many samples as are wanted, in blocks, each sample as likely as any."""
    index, rows = index_of(np.full(4000, 4096), np.arange(4000) // 500), np.arange(4000)
    times = np.zeros(4000, int)
    for epoch in range(50):
        order = orders.resampled(index, rows, 3, epoch, batch=4, steps=999)
        assert order.rows.size == 3996
        np.add.at(times, order.rows, 1)
    assert 0.25 < (np.bincount(order.rows, minlength=4000) == 0).mean() < 0.5  # 1/e is never seen
    assert times.min() > 25 and times.max() < 90
    part = orders.part(order, index, 0, 12)
    assert part.rows.tolist() == order.rows.tolist()
