"""After any fault a run's exit code is right, its end is in time, and nothing is left."""

import pytest

from tests.campaign.campaign import burning, campaign
from tests.campaign.outcome import Outcome

ROUNDS = 25
BLOCKS = range(20)


def broken(outcomes: list[Outcome]) -> str:
    """Return the rounds that broke a promise, each with what to type to see it again."""
    return "\n\n".join(
        f"round {outcome.number} {outcome.fault.name}: {outcome.violations}\n{outcome.said[-1500:]}"
        for outcome in outcomes
        if outcome.violations
    )


@pytest.mark.timeout(1200)
def test_some_faults_of_each_kind_break_no_promise() -> None:
    """A few rounds over SSH, attached and detached, at every run of the suite."""
    for part in ("start", "detached"):  # ranks and launchers: test_endings.py, test_orphans.py
        assert not broken(list(campaign(11, range(1), 2.0, part)))


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("block", BLOCKS)
def test_five_hundred_rounds_break_no_promise(block: int) -> None:
    """All kinds of runs and faults; `python -m tests.campaign.campaign --seed 7` is the same."""
    numbers = range(block * ROUNDS, (block + 1) * ROUNDS)
    assert not broken(list(campaign(7, numbers, 1.5)))


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [101, 102])
def test_a_loaded_machine_makes_no_false_alarm(seed: int) -> None:
    """Both cores burn: no false hang, no false loss, and every fault is still named."""
    with burning(2):
        assert not broken(list(campaign(seed, range(ROUNDS), 4.0)))
