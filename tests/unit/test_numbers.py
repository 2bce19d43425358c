"""Numbers that are typed: in range, or one line of usage, however many digits they have."""

import pytest

from rackrun.errors import UsageError
from rackrun.training.data.choice import class_number
from rackrun.units import MOST_SECONDS, seconds_in, share, whole_number

ENDLESS = "9" * 5000  # Python itself refuses more than 4,300 digits, with a ValueError


@pytest.mark.parametrize(
    ("text", "most", "number"),
    [
        ("0", 0, 0),
        ("0000000000012", 1024, 12),
        ("1024", 1024, 1024),
        ("1025", 1024, None),
        ("00000000000000001025", 1024, None),
        (ENDLESS, 10**9, None),
        ("", 9, None),
        ("-1", 9, None),
        ("+1", 9, None),
        ("1_0", 99, None),
        ("\u0663", 9, None),  # a 3 in Arabic
    ],
)
def test_a_whole_number_is_digits_within_its_limit(text, most, number):
    """Zeros in front change nothing, and nothing else is a number."""
    assert whole_number(text, most) == number


def test_a_number_of_a_class_is_refused_in_a_line_however_long_it_is():
    with pytest.raises(UsageError) as refused:
        class_number("--only-classes", ENDLESS, ("cat", "dog"))
    assert len(str(refused.value)) < 250


def test_a_number_is_no_class_where_classes_are_called_by_other_numbers():
    assert class_number("--only-classes", "2", ("1", "2", "3")) == 1
    assert class_number("--only-classes", "2", ("1", "2", "ten")) == 1
    assert class_number("--only-classes", "0", ("1", "2", "ten")) == 0
    with pytest.raises(UsageError, match="there are 1, 2, 3$"):
        class_number("--only-classes", "0", ("1", "2", "3"))


def test_a_share_is_shown_in_percent_and_any_other_number_as_it_is():
    assert [share(part) for part in (0, 0.95, 1, 95, 9500.0)] == [
        "0.0%", "95.0%", "100.0%", "95", "9500",
    ]  # fmt: skip


def test_a_time_span_has_an_end():
    """A century and a second is none, in any unit."""
    assert seconds_in("36500d") == MOST_SECONDS
    for text in ("36500d1s", f"{MOST_SECONDS + 1}s", "36501d"):
        with pytest.raises(ValueError, match="more than a century"):
            seconds_in(text)
