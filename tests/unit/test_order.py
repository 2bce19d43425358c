"""The order of exact epochs: every sample once, mixed well, and cut among any number of ranks."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rackrun.shards.index import INDEX_FIELDS
from rackrun.training.data.order import BLOCK_BYTES, OPEN, Cut, epoch_order


def index_of(samples: int, sample_bytes: int, shards: int = 1) -> np.ndarray:
    index = np.zeros(samples, INDEX_FIELDS)
    index["length"] = sample_bytes
    index["shard"] = np.arange(samples) * shards // samples
    return index


@given(
    st.integers(1, 700),
    st.integers(1, 3 * BLOCK_BYTES),
    st.integers(1, 9),
    st.integers(0, 2**63 - 1),
)
def test_an_epoch_has_each_row_once(samples, sample_bytes, shards, seed):
    """Whatever the sizes; and the same again for the same seed and epoch."""
    index, rows = index_of(samples, sample_bytes, min(shards, samples)), np.arange(samples)
    order = epoch_order(index, rows, seed, 3, 16)
    assert sorted(order.tolist()) == rows.tolist()
    assert np.array_equal(order, epoch_order(index, rows, seed, 3, 16))


def test_epochs_and_seeds_differ():
    index, rows = index_of(500, 2000), np.arange(500)
    orders = [epoch_order(index, rows, seed, epoch, 8) for seed in (0, 1) for epoch in (0, 1)]
    assert len({order.tobytes() for order in orders}) == 4


def test_the_order_of_a_seed_is_for_ever():
    """A run that resumes under another numpy trains on the same samples."""
    order = epoch_order(index_of(40, 300_000, 2), np.arange(40), 7, 2, 8)
    assert order[:8].tolist() == [16, 39, 0, 11, 27, 21, 3, 18]


def test_copies_of_rows_come_as_often():
    """Rows that begin again, for the second copies of samples, are used twice."""
    rows = np.array([0, 2, 5, 0, 2, 3], np.int32)
    order = epoch_order(index_of(6, 1000), rows, 0, 0, 4)
    assert sorted(order.tolist()) == [0, 0, 2, 2, 3, 5]
    assert order.tolist() == [2, 5, 3, 0, 2, 0], "the order of a seed is for ever"


@pytest.mark.parametrize("batch", [64, 1024])
def test_batches_mix_classes_like_an_even_draw(batch):
    """Of 100,000 images that lie class by class, 40 in a block of neighbors: the counts of a
    class in a batch vary by hardly more than those of images that are drawn evenly."""
    samples, classes = 100_000, 100
    order = epoch_order(index_of(samples, 50_000, 20), np.arange(samples), 0, 0, batch)
    labels = order[: samples // batch * batch] * classes // samples
    counts = np.stack([np.bincount(of, minlength=classes) for of in labels.reshape(-1, batch)])
    assert counts.std() < 1.25 * (batch / classes) ** 0.5


def test_neighbors_are_used_within_a_window():
    """What the page cache has to hold: the blocks that are open at a time, not the data set."""
    samples = 200_000  # in 5,000 blocks
    order = epoch_order(index_of(samples, 50_000), np.arange(samples), 0, 0, 256)
    used_at = np.empty(samples)
    used_at[order] = np.arange(samples) / samples
    step = np.abs(np.diff(used_at))
    between = np.minimum(step, 1 - step)  # blocks at the end of an epoch are open at its begin
    assert np.quantile(between, 0.95) < OPEN / 5000 * 1.05


@given(st.integers(0, 500), st.lists(st.integers(1, 40), min_size=1, max_size=9))
@example(2, [1, 9])
def test_a_cut_gives_everything_away_in_proportion(samples, sizes):
    """Each rank has one at least where there are enough; full steps are cut exactly as asked."""
    for cut in (Cut.even(len(sizes)), Cut.into(sizes)):
        parts = cut.sizes(samples)
        assert parts.sum() == samples and parts.min() >= int(samples >= len(sizes))
        assert cut.edges(samples)[0] == 0
    even = Cut.even(len(sizes)).sizes(samples)
    assert even.max() - even.min() <= 1
    assert Cut.into(sizes).sizes(sum(sizes)).tolist() == sizes
