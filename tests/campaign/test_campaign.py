"""After any fault a run's exit code is right, its end is in time, and nothing is left."""

from pathlib import Path

import pytest

from tests.campaign.campaign import burning, campaign, chosen, played
from tests.campaign.outcome import Outcome, table

ROUNDS = 25
BLOCKS = range(20)


def broken(outcomes: list[Outcome]) -> str:
    """Return the rounds that broke a promise, each with what to type to see it again."""
    return "\n\n".join(
        f"round {outcome.number} {outcome.fault.name}: {outcome.violations}\n"
        f"{outcome.output[-1500:]}"
        for outcome in outcomes
        if outcome.violations
    )


@pytest.mark.timeout(1200)
def test_some_faults_of_each_kind_break_no_promise():
    """A few rounds over SSH, attached and detached, at every run of the suite."""
    for part in ("start", "detached"):  # ranks and launchers: test_endings.py, test_orphans.py
        assert not broken(list(campaign(11, range(1), 2.0, part)))


class BrokenHosts:
    """A lab on which nothing can be started."""

    folder = Path("/nonexistent")

    def stop(self) -> None:
        pass

    def cheap_python(self) -> str:
        raise FileNotFoundError("no python on this host")


def test_a_round_that_does_not_start_is_a_row_and_not_the_end():
    """Its precondition is the violation; the rounds after it are played, and the table has all."""
    outcomes = list(played(list(chosen(11, range(3), "rank")), 11, 1.0, BrokenHosts))
    assert [outcome.number for outcome in outcomes] == [0, 1, 2]
    assert all("precondition: FileNotFoundError" in o.violations[0] for o in outcomes)
    assert table(outcomes).count("| None |") >= 1


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("block", BLOCKS)
def test_five_hundred_rounds_break_no_promise(block):
    """All kinds of runs and faults; `python -m tests.campaign.campaign --seed 7` is the same."""
    numbers = range(block * ROUNDS, (block + 1) * ROUNDS)
    assert not broken(list(campaign(7, numbers, 1.5)))


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [101, 102])
def test_a_loaded_machine_makes_no_false_alarm(seed):
    """Both cores burn: no false hang, no false loss, and every fault is still named."""
    with burning(2):
        assert not broken(list(campaign(seed, range(ROUNDS), 4.0)))
