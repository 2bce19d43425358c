"""Which rank the others wait for, by what each reports of its own steps."""

import numpy as np
import pytest

from rackrun.launcher.run.stragglers import straggler
from rackrun.training.stragglers import straggler_in


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ((0.02, 0.12), "compute"),
        ((0.05, 0.1), "data"),
        ((0.02, 0.1), ""),  # as the others
        ((0.03, 0.1), ""),  # a tenth later, which is not worth a line
        ((0.0, 0.01), ""),  # sooner: no rank waits for it
    ],
)
def test_who_is_late_by_more_than_a_tenth_is_named_with_the_part(second, why):
    """Medians count: a single step of a second names no rank."""
    once = [(1.0, 0.1)] + [(0.02, 0.1)] * 10
    result = straggler({0: once, 1: [second] * 11, 2: once}, dict.fromkeys(range(3), "gpu01"))
    assert (result.rank, result.why) == (1, why) if result else not why


def times(ranks: int, steps: int = 100) -> np.ndarray:
    """Return times of ranks that are alike: 2 ms of data, 30 of compute, 3 of network, noise."""
    noise = np.random.default_rng(0).uniform(0, 2e-4, (ranks, steps, 3))
    return np.array([0.002, 0.030, 0.003]) + noise


def late(times: np.ndarray, rank: int, part: int, seconds: float, every: int = 1) -> None:
    """Let a rank take longer in a part of every n-th step; the others wait in the exchange."""
    times[rank, ::every, part] += seconds
    times[np.arange(len(times)) != rank, ::every, 2] += seconds


@pytest.mark.parametrize(("part", "why"), [(0, "data"), (1, "compute")])
def test_a_rank_that_is_always_late_is_named_with_the_reason(part, why):
    """Seven ranks wait 12 ms a step for the eighth; what it takes stands beside the others'."""
    observed = times(8)
    late(observed, 5, part, 0.012)
    result = straggler_in(observed)
    assert (result.rank, result.why) == (5, why)
    assert result.waited == pytest.approx(0.012, abs=1e-3)
    assert result.rank_seconds - result.others_seconds == pytest.approx(0.012, abs=1e-3)
    assert result.network == pytest.approx(0.003, abs=1e-3)
    assert "the others wait for rank 5 " in result.text() and f"its {why} takes" in result.text()


def test_a_rank_that_is_late_now_and_then_is_found_among_others():
    """Means over steps hide one that stalls for half a second in every fiftieth step; this not."""
    observed = times(4)
    late(observed, 2, 0, 0.5, every=50)
    late(observed, 1, 1, 0.002, every=3)
    result = straggler_in(observed)
    assert (result.rank, result.why) == (2, "data")
    assert result.waited == pytest.approx(0.01, rel=0.1)


def test_a_slow_network_names_no_rank():
    """Where all ranks wait, none is named."""
    observed = times(4)
    observed[:, :, 2] += 0.05
    result = straggler_in(observed)
    assert result.text().startswith("last 100 steps: network-bound: ")
    assert "rank" not in result.text()


def test_ranks_that_keep_step_are_no_news():
    """Nothing is said where nothing is to be won."""
    assert straggler_in(times(4)).text() == ""
