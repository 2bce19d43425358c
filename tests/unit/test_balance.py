"""--balance auto: ranks get images in proportion to their speed, and nothing else changes."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rackrun.training.balance import Balance, fastest_counts, why_even
from rackrun.training.data.order import Steps
from rackrun.training.step_times import EVERY_STEPS, FIRST_STEPS

LEAD = 5


def steps_of(ranks: int, batch: int) -> Steps:
    return Steps(batch, batch, ranks, LEAD)


def trained(
    steps: Steps, costs: Callable[[int], Any], count: int
) -> Iterator[tuple[int, list[int]]]:
    """Yield the step of each new cut and its counts; `costs` is by step and rank, per image."""
    balancer, done = Balance(steps), 0
    for look in (FIRST_STEPS, *(EVERY_STEPS for _ in range(count // EVERY_STEPS))):
        times = [steps.cut(n).sizes(steps.batch) * costs(n) for n in range(done, done + look)]
        done += look
        if balancer.recut(done, np.stack(times, 1)):
            yield done, balancer.counts


def efficiency(counts: Sequence[int], costs: Sequence[float]) -> float:
    """Return the speed of a cut as a share of the sum of the ranks' speeds."""
    seconds = float((np.array(counts) * costs).max())
    return sum(counts) / seconds / sum(1 / cost for cost in costs)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_ranks_of_unlike_speed_reach_the_sum_of_their_speeds(noise):
    """Ranks of speed 1, 2 and 4, whose steps vary by a tenth: within 220 steps the cut gives 95 %
    of what all of them can; an even cut gives 43 %."""
    chance, speeds, steps = np.random.default_rng(0), np.array([4e-3, 2e-3, 1e-3]), steps_of(3, 112)
    *_, (_, counts) = trained(steps, lambda step: speeds * chance.normal(1, noise, 3), 200)
    assert efficiency([37, 37, 38], speeds) < 0.45
    assert efficiency(counts, speeds) > 0.95


@pytest.mark.parametrize("ranks", [2, 64])
def test_noise_moves_nothing(ranks):
    """Equal ranks whose steps vary by a tenth keep the even cut for 4,000 steps."""
    chance = np.random.default_rng(ranks)
    noisy = lambda step: 1e-3 * chance.normal(1, 0.1, ranks)  # noqa: E731
    assert not list(trained(steps_of(ranks, 32 * ranks), noisy, 4000))


def test_steps_that_something_interrupts_move_nothing():
    """A rank that loses a second in every twentieth step, as others save or log, is not slow."""

    def costs(step: int) -> Any:
        return 1e-3 * np.array([1, 30 if step % 20 == 7 else 1, 1])

    assert not list(trained(steps_of(3, 96), costs, 2000))


def test_a_gpu_that_is_throttled_gives_images_away_and_gets_them_back():
    """One of four at half its speed from step 1,000 to 2,000: others take its images meanwhile."""
    chance = np.random.default_rng(1)

    def costs(step: int) -> Any:
        factors = np.array([1, 1, 2 if 1000 <= step < 2000 else 1, 1])
        return 1e-3 * factors * chance.normal(1, 0.1, 4)

    cuts = list(trained(steps_of(4, 128), costs, 3000))
    throttled = [counts for step, counts in cuts if step <= 2000][-1]
    assert 1000 < cuts[0][0] < 1400 and throttled[2] == pytest.approx(18, abs=2)
    assert cuts[-1][1] == pytest.approx([32, 32, 32, 32], abs=2)
    assert len(cuts) < 12


def test_a_step_in_which_a_rank_had_no_part_says_nothing_of_it():
    """Of the last step of an epoch with fewer samples than ranks there are no times."""
    steps = steps_of(2, 48)
    times = np.tile([[3e-3], [1.5e-3]], 40)
    times[1, 30:] = -1
    balancer = Balance(steps)
    assert balancer.recut(40, times) and balancer.counts == [16, 32]
    assert not Balance(steps_of(2, 48)).recut(9, times[:, :9])  # too few


def test_a_share_has_limits():
    """No rank gets less than an eighth of its even part or more than three times as much, and all
    images are given away; the slowest rank then is done as soon as it can be."""
    chance = random.Random(2)
    for _ in range(300):
        ranks, even = chance.randint(1, 9), chance.randint(2, 40)
        batch = ranks * even + chance.randrange(ranks)
        costs = np.array([10 ** chance.uniform(-4, -1) for _ in range(ranks)])
        least, most = max(2, round(batch / ranks / 8)), min(batch, even * 3)
        counts = fastest_counts(costs, batch, least, most)
        assert counts.sum() == batch and counts.min() >= least and counts.max() <= most
        slowest = (counts * costs).argmax()
        for other in np.flatnonzero(counts < most) if counts[slowest] > least else ():
            one_less = (counts[other] + 1) * costs[other]
            assert other == slowest or one_less >= (counts * costs).max() * (1 - 1e-9)


def test_what_needs_an_even_cut_keeps_it():
    """Norms over all ranks and steps without a choice stay even, with the reason."""
    synced = torch.nn.Sequential(torch.nn.SyncBatchNorm(3))
    assert "exchange their statistics" in why_even(synced, 64, 2)
    assert "--global-batch" in why_even(torch.nn.Flatten(), 12, 8)
    assert why_even(torch.nn.Flatten(), 16, 8) == ""
