"""When ranks of an elastic run start again: at once, or after ever longer pauses."""

from launcher.supervision.retries import LASTING_STEPS, PAUSE_SECONDS, Retries

HOUR = 3600.0


def test_a_host_that_is_lost_once_an_hour_always_returns_at_once() -> None:
    """Thirty losses of ranks that train in between are thirty first ones."""
    retries = Retries()
    for hour in range(30):
        retries.join([4, 5], hour * LASTING_STEPS)
        retries.lose([4, 5], (hour + 1) * LASTING_STEPS)
        assert retries.pause_seconds([4, 5]) == 0


def test_a_host_that_fails_at_each_start_is_tried_ever_less_often() -> None:
    """A day has thirteen starts that fail after a minute; steps of the others do not count."""
    retries, now, starts = Retries(), 0.0, 0
    while now < 24 * HOUR:
        starts += 1
        retries.lose([0], step=round(now))  # the others go on, a step a second
        now += 60 + retries.pause_seconds([0])
    assert starts == 13


def test_a_rank_that_dies_at_its_first_steps_counts_as_one_that_never_joined() -> None:
    """What counts are steps with the others, not those that have been made at its loss."""
    retries = Retries()
    retries.join([0, 1], 0)
    for step in (5000, 5010, 5010 + 2 * LASTING_STEPS - 1):
        retries.lose([1], step)
        retries.join([0, 1], step + LASTING_STEPS)
    assert retries.pause_seconds([1]) == 2 * PAUSE_SECONDS
    assert retries.pause_seconds([0]) == 0, "the other rank of the host has trained on"
    retries.lose([0, 1], 5010 + 5 * LASTING_STEPS)
    assert retries.pause_seconds([0, 1]) == 0, "both have trained for a while"


def test_what_was_sent_away_is_not_lost() -> None:
    """A rank whose host was left to another launch begins again without a loss."""
    retries = Retries()
    retries.join([0], 100)
    retries.leave([0])
    retries.join([0], 200)
    retries.lose([0], 200 + LASTING_STEPS)
    assert retries.pause_seconds([0]) == 0
