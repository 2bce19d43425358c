"""ExactSampler: every sample once an epoch, for a DataLoader on any number of ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun import ExactSampler, Problem


def epochs(samples, batch, world, step=0, count=2):
    """Return the steps of some epochs: the samples of all ranks together."""
    samplers = [
        ExactSampler(samples, batch, seed=3, step=step, rank=rank, world=world)
        for rank in range(world)
    ]
    steps = []
    for _ in range(count):
        assert {len(sampler) for sampler in samplers} == {len(samplers[0])}
        for parts in zip(*samplers, strict=True):
            assert max(map(len, parts)) - min(map(len, parts)) <= 1 <= min(map(len, parts))
            steps.append(sum(parts, []))
    return steps


@given(st.integers(1, 300), st.integers(1, 60), st.integers(1, 9), st.data())
def test_epochs_are_exact_and_resume_by_their_step(samples, batch, world, data):
    """On another number of ranks, and at any step: the steps that were left, sample for sample."""
    most = samples // -(-samples // batch)
    steps = epochs(samples, batch, min(world, most))
    half = len(steps) // 2
    for epoch in (steps[:half], steps[half:]):
        assert sorted(sum(epoch, [])) == list(range(samples))
        sizes = [len(step) for step in epoch]
        assert max(sizes) <= batch and max(sizes) - min(sizes) <= 1
    start = data.draw(st.integers(0, half - 1))
    assert epochs(samples, batch, data.draw(st.integers(1, most)), start) == steps[start:]


def test_epochs_differ():
    first, second = epochs(100, 100, 1)
    assert first != second and first != list(range(100))


def test_a_rank_without_samples_is_refused():
    with pytest.raises(Problem, match="fewer than 8 ranks"):
        ExactSampler(100, 4, rank=0, world=8)
