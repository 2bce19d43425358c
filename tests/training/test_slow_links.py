"""Whose link is slow: what the times say by which blocks arrive from left and right."""

import numpy as np
import pytest

from training.monitor.stragglers import WORTH_NAMING, slowest_host


def times(hosts: int) -> np.ndarray:
    """Return times of links that are alike: 10 ms in either direction, and a little noise."""
    return 0.01 + np.random.default_rng(0).uniform(0, 5e-4, (hosts, 2))


@pytest.mark.parametrize("hosts", [3, 4, 9])
def test_a_host_that_sends_slowly_is_found_by_its_neighbours(hosts: int) -> None:
    """Both get its blocks late; they themselves are not blamed."""
    observed = times(hosts)
    observed[2 % hosts, 0] = observed[0, 1] = 0.041
    result = slowest_host(observed)
    assert result.rank == 1
    assert result.times == pytest.approx(4.1, rel=0.05)


@pytest.mark.parametrize("hosts", [3, 4, 9])
def test_a_host_that_receives_slowly_is_found(hosts: int) -> None:
    """It alone gets both blocks late."""
    observed = times(hosts)
    observed[0] = 0.09, 0.08
    result = slowest_host(observed)
    assert result.rank == 0
    assert result.times == pytest.approx(8, rel=0.05)


def test_one_slow_block_names_no_host() -> None:
    """A hiccup on one way, or one bad cable between two switches, is no host's."""
    observed = times(4)
    observed[2, 0] = 0.5
    assert slowest_host(observed).times < WORTH_NAMING
