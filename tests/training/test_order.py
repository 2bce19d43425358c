"""The order of an epoch: every sample once, cut alike for every number of ranks and workers."""

import pickle
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackrun.shards.index import INDEX_FIELDS
from rackrun.training.data.mixture import mixture
from rackrun.training.data.order import cut as cuts
from rackrun.training.data.order import epoch as orders
from rackrun.training.data.order import reading
from rackrun.training.data.order.cut import Cut, Lanes, moves
from rackrun.training.data.order.epoch import EpochOrder, mixed
from rackrun.training.data.order.reading import Reader, ReaderPart, Reading
from rackrun.training.data.order.shared import SharedOrder

IMAGENET = 1_281_167


def index_of(lengths: np.ndarray, shards: np.ndarray) -> np.ndarray:
    """Return an index of samples of these lengths, in these shards."""
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
    portion: int  # that a reader plans at a time
    is_even: bool

    @property
    def cut(self) -> Cut:
        """Return the even cut, or one in which some ranks get many times more than others."""
        if self.is_even or self.batch <= self.ranks:
            return Cut.even(self.ranks)
        shares = np.random.default_rng(self.seed).dirichlet(np.full(self.ranks, 0.5))
        return Cut.into(1 + np.diff(np.rint(np.cumsum([0, *shares]) * (self.batch - self.ranks))))

    @property
    def index(self) -> np.ndarray:
        return index_of(self.lengths, self.shards)

    def order(self, epoch: int = 0) -> EpochOrder:
        return orders.shuffled(self.index, range(self.lengths.size), self.seed, epoch, self.batch)

    def parts(self, order: EpochOrder, start: int = 0) -> list[list[ReaderPart]]:
        """Return the parts by rank and worker."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reading, "PORTION", self.portion)
            return [
                [
                    whole(order, start, self.batch, Reader(rank, self.cut, worker, self.workers))
                    for worker in range(self.workers)
                ]
                for rank in range(self.ranks)
            ]


def whole(order: EpochOrder, start: int, batch: int, reader: Reader = Reader()) -> ReaderPart:  # noqa: B008
    """Return a reader's whole part of an epoch."""
    parts = list(Reading(order, start, batch, reader).parts())
    joined = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("rows", "positions", "batch_indices", "brought_by", "reads")
    }
    before = np.cumsum([0, *(part.rows.size for part in parts)])
    ends = [part.ends + done for part, done in zip(parts, before, strict=False)]
    return ReaderPart(**joined, ends=np.concatenate(ends))


@st.composite
def cases(draw: st.DrawFn, most: int) -> Case:
    samples = draw(st.integers(1, most))
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
        portion=draw(st.sampled_from([1, 30, 1 << 16])),
        is_even=draw(st.booleans()),
    )


def steps_of(order: EpochOrder, start: int, batch: int) -> list[list[int]]:
    return [order.rows[at : at + batch].tolist() for at in range(start, order.rows.size, batch)]


def dealt(parts: list[list[ReaderPart]]) -> list[list[list[int]]]:
    """Return the rows of each batch: by step, by rank, in order."""
    steps = parts[0][0].ends.size
    batches: list[list[dict[int, int]]] = [[{} for _ in parts] for _ in range(steps)]
    for rank, workers in enumerate(parts):
        for part in workers:
            assert part.ends.size == steps
            numbers = np.searchsorted(part.ends, np.arange(part.rows.size), side="right")
            for row, step, batch_index in zip(part.rows, numbers, part.batch_indices, strict=True):
                assert batch_index not in batches[step][rank]
                batches[step][rank][int(batch_index)] = int(row)
    for step in batches:
        assert all(sorted(batch) == list(range(len(batch))) for batch in step)
    return [[[row for _, row in sorted(batch.items())] for batch in step] for step in batches]


ANY_SIZE = pytest.mark.parametrize("most", [250, pytest.param(3000, marks=pytest.mark.long)])


@ANY_SIZE
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_an_epoch_is_the_data_set(data, most):
    """Whatever the data set and the machines: each step's samples are those of one rank alone.
    Each rank gets what the cut gives it, of a full step exactly that, and parts of an even cut
    differ by one at most. An epoch has every sample exactly once."""
    case = data.draw(cases(most))
    order = case.order()
    steps = steps_of(order, 0, case.batch)
    assert sorted(row for step in steps for row in step) == list(range(case.lengths.size))
    parts = case.parts(order)
    for rows, by_rank in zip(steps, dealt(parts), strict=True):
        assert Counter(row for part in by_rank for row in part) == Counter(rows)
        sizes = np.array([len(part) for part in by_rank])
        assert (case.cut.fewest(len(rows)) <= sizes).all() and (
            sizes <= case.cut.most(len(rows))
        ).all()
        if case.cut.is_even:
            assert max(sizes) - min(sizes) <= 1
        elif len(rows) == case.batch:
            assert (sizes == np.array(case.cut.weights) + 1).all()


@ANY_SIZE
@given(data=st.data(), raw_start=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_the_rest_of_an_epoch_is_what_was_not_yet_trained(data, raw_start, most):
    """From any position, at any other number of ranks and batch size, the very next samples."""
    case = data.draw(cases(most))
    order = case.order(epoch=3)
    start = raw_start % case.lengths.size
    rest = dealt(case.parts(order, start))
    for rows, by_rank in zip(steps_of(order, start, case.batch), rest, strict=True):
        assert Counter(row for part in by_rank for row in part) == Counter(rows)


@ANY_SIZE
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_no_byte_is_read_twice(data, most):
    """All reads of an epoch together are the bytes of the samples, none of them twice."""
    case = data.draw(cases(most))
    times = np.zeros(case.lengths.size, int)
    for part in sum(case.parts(case.order()), []):
        first_uses = part.brought_by == part.positions
        reads = dict(zip(part.positions[first_uses].tolist(), part.reads.tolist(), strict=True))
        for position, brought_by, row in zip(
            part.positions.tolist(), part.brought_by.tolist(), part.rows.tolist(), strict=True
        ):
            first, samples = reads[brought_by]
            assert 0 <= row - first < samples and brought_by <= position
        for first, samples in part.reads.tolist():
            times[first : first + samples] += 1
            assert len(set(case.shards[first : first + samples].tolist())) == 1
    assert (times == 1).all()


def test_evening_out_goes_step_by_step(monkeypatch):
    """A long epoch is evened out in portions, and these leave no trace in the result."""
    cut = Cut.even(7)
    whole = list(moves(5, 20_000, 13, Lanes(cut, 960), cut))
    monkeypatch.setattr(cuts, "MOVES_AT_ONCE", 100)
    portions = list(moves(5, 20_000, 13, Lanes(cut, 960), cut))
    assert len(whole) == 1 < len(portions)
    for column in range(3):
        assert (np.concatenate([each[column] for each in portions]) == whole[0][column]).all()


def imagenet() -> np.ndarray:
    """Return an index like ImageNet's: 140 GB in shards of about 1 GB, sorted by class."""
    random = np.random.default_rng(0)
    lengths = (random.lognormal(11.4, 0.5, IMAGENET).astype(np.int64) // 512 + 3) * 512
    index = index_of(lengths, np.arange(IMAGENET) // 9000)
    index["label"] = np.arange(IMAGENET) * 1000 // IMAGENET
    return index


@pytest.fixture(scope="module")
def large() -> np.ndarray:
    return imagenet()


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak of the bytes that a call allocates."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_planning_costs_a_block_eight_bytes_and_a_reader_its_share(large):
    """An epoch of 1,281,167 samples is planned within 20 MB, and what one of 128 readers has of it
    in 3 MB; one that reads all of it never holds more than a portion."""
    rows = mixture(large["label"], {}).rows(0)
    planned: list[EpochOrder] = []
    assert peak_bytes(lambda: planned.append(orders.shuffled(large, rows, 0, 1, 2048))) < 20e6
    order = planned[0]
    assert order.starts.nbytes + order.ends.nbytes < 1.5e6
    assert peak_bytes(lambda: whole(order, 0, 2048, Reader(3, Cut.even(8), 1, 16))) < 3e6
    assert peak_bytes(lambda: next(Reading(order, 0, 2048, Reader()).parts())) < 25e6
    kept = Reading(order, 0, 2048, Reader(3, Cut.even(8), 1, 16))
    assert len(pickle.dumps(vars(kept)["_waiting"])) < 40e3


def test_reads_are_blocks(large):
    """Ranks that divide the lanes read 2 MiB at a time; with 7 ranks that is nearly so."""
    order = orders.shuffled(large, np.arange(IMAGENET), 0, 1, 256)
    for ranks, least in ((8, 1.9), (64, 1.9), (7, 1.5), (56, 0.8)):
        part = whole(order, 0, 4 * ranks, Reader(0, Cut.even(ranks), 0, 2))
        assert large["length"][part.rows].sum() / part.reads.size / 2**20 > least


def clumping(labels: np.ndarray, batch: int) -> float:
    """Return the variance of samples per class and batch, as a multiple of random batches'."""
    batches = labels[: labels.size // batch * batch].reshape(-1, batch)
    counts = np.stack([np.bincount(part, minlength=1000) for part in batches])
    share = counts.mean()
    return float(((counts - share) ** 2).mean() / share / (1 - 1 / 1000))


@pytest.mark.parametrize(
    "batch",
    [
        *(256, 32768),
        *(pytest.param(2**power, marks=pytest.mark.long) for power in (10, 11, 12, 13, 14)),
    ],
)
def test_batches_are_mixed(large, batch):
    """Even from shards in class order, a batch of any size has as many samples of each class as a
    random one has, and neighbours in a shard meet in a step no more often than in a random one."""
    order = orders.shuffled(large, np.arange(IMAGENET), 0, 1, batch)
    labels = large["label"][order.rows]
    uniform = large["label"][np.random.default_rng(0).permutation(IMAGENET)]
    assert clumping(labels, batch) == pytest.approx(clumping(uniform, batch), rel=0.08)
    assert clumping(np.sort(labels), 256) > 100  # the measure sees what is not mixed
    position_of_row = np.argsort(order.rows)
    assert (np.diff(position_of_row // batch) == 0).mean() < batch / IMAGENET
    assert np.median(np.abs(np.diff(position_of_row))) > 2 * min(batch, 4096)


def test_memory_for_mixing_grows_slower_than_the_batch(large):
    """Half of each lane's open block, over all ranks: 1 GiB, and 6 GiB for batches of 32,768."""
    for batch, most in ((256, 1.0), (4096, 2.2), (32768, 6.0)):
        lanes = orders.lane_count(IMAGENET, batch)
        starts = orders.block_starts(large, np.arange(IMAGENET), lanes, phase=0.5)
        block = large["length"].sum(dtype=np.int64) / (starts.size - 1)
        assert lanes % 960 == 0 and lanes >= batch
        assert lanes * block / 2 < most * 2**30


def test_epochs_differ_and_follow_from_the_seed():
    """The same seed and epoch give the same order, any other numbers another one."""
    index, rows = index_of(np.full(3000, 4096), np.arange(3000) // 100), np.arange(3000)
    order = orders.shuffled(index, rows, 7, 0, 16).rows
    assert (order == orders.shuffled(index, rows, 7, 0, 16).rows).all()
    for seed, epoch in ((7, 1), (8, 0)):
        assert (order == orders.shuffled(index, rows, seed, epoch, 16).rows).mean() < 0.01


def test_the_order_stays_what_it_was():
    """A run of last year goes on with the same order: these are the numbers of version 0.1."""
    index = index_of(np.full(500, 4096), np.arange(500) // 100)
    order = orders.shuffled(index, np.arange(500), 1, 2, 16)
    assert order.rows[:8].tolist() == [31, 339, 95, 197, 6, 336, 315, 309]
    index = index_of(512 * (1 + np.arange(60_000) % 97), np.arange(60_000) // 700)
    twice = np.concatenate([np.arange(60_000), np.arange(0, 60_000, 3)])
    samples = [
        orders.shuffled(index, range(60_000), 5, 1, 1024),
        orders.shuffled(index, twice, 5, 2, 3000),
        orders.resampled(index, range(60_000), 5, 3, 100, 99),
    ]
    sums = [zlib.crc32(order.rows.tobytes()) for order in samples]
    assert sums == [2948029754, 2636225220, 1968713849]


def test_an_order_is_planned_once_for_a_rank():
    """Loader workers find what the first of them planned, also of chosen rows; they plan again when
    they come to another epoch. A plan that fails keeps no other one out."""
    index, planned = index_of(np.full(3000, 4096), np.arange(3000) // 100), list[int]()
    chosen = {0: range(3000), 1: np.arange(0, 3000, 2, dtype=np.int32)}

    def plan(epoch: int) -> EpochOrder:
        planned.append(epoch)
        return orders.shuffled(index, chosen[epoch], 7, epoch, 16)

    shared = SharedOrder()
    for epoch in (0, 0, 1, 1, 0):
        with shared.of(epoch, plan) as order:
            assert order.rows.tolist() == plan(epoch).rows.tolist()
            del planned[-1]
    assert planned == [0, 1, 0]
    with pytest.raises(KeyError), shared.of(2, plan):
        pass
    with shared.of(0, plan) as order:
        assert order.samples == 3000


def test_an_order_that_was_not_written_to_its_end_is_not_believed():
    """Nor is the one that was there before: a worker that plans again finds neither."""
    index = index_of(np.full(3000, 4096), np.arange(3000) // 100)
    whole_order, planned = orders.shuffled(index, range(3000), 7, 0, 16), list[int]()
    cut_short = replace(whole_order, epoch=1, ends=np.array(["no numbers"]))

    def plan(epoch: int) -> EpochOrder:
        planned.append(epoch)
        return cut_short if epoch else whole_order

    shared = SharedOrder()
    with shared.of(0, plan) as order:
        assert order.samples == 3000
    with pytest.raises(ValueError, match="no numbers"), shared.of(1, plan):
        pass
    with shared.of(0, plan) as order:
        assert order.rows.tolist() == whole_order.rows.tolist()
    assert planned == [0, 1, 0]


def test_subsets_and_first_samples():
    """A subset of classes and the first N read only the bytes of their samples."""
    index = index_of(np.full(1000, 2048), np.arange(1000) // 100)
    labels = np.arange(1000) % 10
    rows = mixture(labels, {}, only=frozenset({3, 4}), first=50).rows(0)
    part = whole(orders.shuffled(index, rows, 0, 0, 16), 0, 16)
    assert sorted(part.rows.tolist()) == sorted(rows.tolist())
    assert set(labels[part.rows]) == {3, 4} and part.rows.max() == 244
    assert part.reads["samples"].sum() == 50


@given(st.dictionaries(st.integers(0, 4), st.floats(0, 3), min_size=1), st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_weights_are_kept_exactly(weights, samples):
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
        observed, size = counts[labels == label], (labels == label).sum()
        assert observed.sum() == 6 * round(weights.get(label, 1) * size)
        assert observed.max() - observed.min() <= 1


def test_copies_of_a_sample_keep_apart():
    """A class of weight 2 is drawn twice; its copies are in different blocks."""
    index = index_of(np.full(4000, 4096), np.arange(4000) // 500)
    rows = mixture(np.arange(4000) % 4, {1: 2.0}).rows(0)
    order = orders.shuffled(index, rows, 0, 0, 16)
    assert order.rows.size == 5000
    pieces = order.pieces_of(np.arange(order.lanes))
    numbers, rows, _ = mixed(pieces, order.drawn, order.lanes, order.stream())
    pairs = set(zip(rows.tolist(), numbers.tolist(), strict=True))
    assert len(pairs) == 5000


def test_resampled_blocks_are_drawn_evenly():
    """With replacement: as many samples as are wanted, in blocks, each sample as likely as any."""
    index, rows = index_of(np.full(4000, 4096), np.arange(4000) // 500), np.arange(4000)
    times = np.zeros(4000, int)
    for epoch in range(50):
        order = orders.resampled(index, rows, 3, epoch, batch=4, steps=999)
        assert order.rows.size == 3996
        np.add.at(times, order.rows, 1)
    assert 0.25 < (np.bincount(order.rows, minlength=4000) == 0).mean() < 0.5  # 1/e is never seen
    assert times.min() > 25 and times.max() < 90
    part = whole(order, 0, 12)
    assert part.rows.tolist() == order.rows.tolist()
