"""Which rank the others wait for, by what each reports of its own steps."""

import pytest

from rackrun.launcher.run.stragglers import straggler


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
