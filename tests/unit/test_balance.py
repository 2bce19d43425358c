"""--balance auto: ranks get images in proportion to their speed, and nothing else changes."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rackrun.training.balance import Balance, fastest_counts, remedy, why_even
from rackrun.training.config import Config
from rackrun.training.data.order import Cut, Steps
from rackrun.training.ranks import Ranks
from rackrun.training.stragglers import Waiting

LEAD = 5
AUTO = Config(balance="auto", data="shards", exact_epochs=True)


def waiting(rank: int) -> Waiting:
    return Waiting(20, 0.1, rank, "compute", 0.05, 0.08, 0.02, 0.0)


def balance(ranks: int, batch: int) -> Balance:
    """Return what a first rank has at the begin of a run."""
    steps = Steps(batch, batch, ranks, LEAD)
    return Balance(Ranks(0, ranks, 0, ranks, torch.device("cpu")), steps, 0, lambda: 1)


def trained(
    balancer: Balance, costs: Callable[[int], Sequence[float]], steps: int, first: int = 0
) -> Iterator[tuple[int, Cut]]:
    """Yield the cuts that are found, with the steps after which; `costs` is by step and rank."""
    cuts = [balancer.cut]
    for step in range(first, first + steps):
        now = next(cut for cut in reversed(cuts) if cut.step <= step)
        times = now.sizes(balancer._batch) * costs(step) * 1e9
        balancer.sent()
        if cut := balancer.next_cut(step + 1, times.astype(int).tolist()):
            cuts.append(cut)
            yield step + 1, cut


def efficiency(counts: Sequence[int], costs: Sequence[float]) -> float:
    """Return the speed of a cut as a share of the sum of the ranks' speeds."""
    seconds = float((np.array(counts) * costs).max())
    return sum(counts) / seconds / sum(1 / cost for cost in costs)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_ranks_of_unlike_speed_reach_the_sum_of_their_speeds(noise):
    """Ranks of speed 1, 2 and 4, whose steps vary by a tenth: within 200 steps the cut gives 95 %
    of what all of them can; an even cut gives 43 %."""
    chance, speeds = np.random.default_rng(0), np.array([4e-3, 2e-3, 1e-3])
    balancer = balance(3, 112)
    for _ in trained(balancer, lambda step: speeds * chance.normal(1, noise, 3), 200):
        pass
    assert efficiency([37, 37, 38], speeds) < 0.45
    assert efficiency(balancer.counts, speeds) > 0.95


@pytest.mark.parametrize("ranks", [2, 64])
def test_noise_moves_nothing(ranks):
    """Equal ranks whose steps vary by a tenth keep the even cut for 4,000 steps."""
    chance = np.random.default_rng(ranks)
    noisy = lambda step: 1e-3 * chance.normal(1, 0.1, ranks)  # noqa: E731
    assert not list(trained(balance(ranks, 32 * ranks), noisy, 4000))


def test_steps_that_something_interrupts_move_nothing():
    """A rank that loses a second in every twentieth step, as others save or log, is not slow."""

    def costs(step: int) -> Any:
        return 1e-3 * np.array([1, 30 if step % 20 == 7 else 1, 1])

    assert not list(trained(balance(3, 96), costs, 2000))


def test_a_gpu_that_is_throttled_gives_images_away_and_gets_them_back():
    """One of four at half its speed from step 1,000 to 2,000: others take its images meanwhile."""
    chance = np.random.default_rng(1)

    def costs(step: int) -> Any:
        factors = np.array([1, 1, 2 if 1000 <= step < 2000 else 1, 1])
        return 1e-3 * factors * chance.normal(1, 0.1, 4)

    balancer = balance(4, 128)
    cuts = list(trained(balancer, costs, 3000))
    throttled = [cut for step, cut in cuts if step < 2000][-1]
    assert 1000 < cuts[0][0] < 1400 and throttled.sizes(128)[2] == pytest.approx(18, abs=2)
    assert balancer.counts == pytest.approx([32, 32, 32, 32], abs=2)
    assert len(cuts) < 12


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


def test_the_stragglers_line_says_what_is_done():
    """Under the even cut it names the option, with it the images that the rank gets, and since
    when; where nothing can be done it says nothing."""
    even = Config(data="shards")
    assert "(--balance auto gives it fewer images)" in text_for(None, 0, even)
    assert "images" not in text_for(None, 0, AUTO)
    balancer = balance(3, 112)
    (step, cut), *_ = trained(balancer, lambda step: [4e-3, 2e-3, 1e-3], 100)
    assert cut.step == step + LEAD
    assert f"(it gets 16 of 112 images a step from step {cut.step + 1} on)" in text_for(
        balancer, step
    )
    assert "(it gets 16 of 112 images a step)" in text_for(balancer, 100)


def text_for(balancer: Balance | None, step: int, config: Config = AUTO) -> str:
    report = waiting(0)
    return replace(report, remedy=remedy(config, balancer, report, step)).text()
