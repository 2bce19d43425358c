"""Numbers that are typed: in range, or one line of usage, however many digits they have."""

import pytest

from rackrun.convert.__main__ import main as convert
from rackrun.errors import Problem, UsageError
from rackrun.launcher.commands.node_agreement import slots_of
from rackrun.launcher.commands.settings import NodeOptions, SshOptions
from rackrun.launcher.run.hosts import Host, parse_hosts, select
from rackrun.launcher.run.job import Limits
from rackrun.launcher.run.settings import LocalOptions
from rackrun.launcher.schedulers.placement import Sourced
from rackrun.training.data.mixture import class_number
from rackrun.units import MOST_SECONDS, seconds_in, whole_number

ENDLESS = "9" * 5000  # Python itself refuses more than 4,300 digits, with a ValueError
LONG = "9" * 400  # more than a float holds
NODES = Sourced(1, "--nodes")
HOSTS = (Host("gpu01"), Host("gpu02", slots=4))


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


@pytest.mark.parametrize(
    "asked",
    [
        lambda: select(HOSTS, f"gpu01:{ENDLESS}", ""),
        lambda: select(HOSTS, f"gpu01:0,{ENDLESS}", ""),
        lambda: select(HOSTS, "", "gpu02:1024"),
        lambda: parse_hosts(f"gpu01 slots={ENDLESS}"),
        lambda: parse_hosts("gpu01 slots=00000000011025"),
        lambda: parse_hosts(f"gpu01:{ENDLESS}"),
        lambda: LocalOptions(nproc=10**400),
        lambda: LocalOptions(nproc=1025),
        lambda: LocalOptions(time_limit=f"{ENDLESS}s").jobs,
        lambda: LocalOptions(time_limit=f"{LONG}d").jobs,
        lambda: LocalOptions(time_limit="99999999999d").jobs,
        lambda: Limits(lease_seconds=1e12),
        lambda: Limits(hang_seconds=float("nan")),
        lambda: NodeOptions(wait_seconds=float("inf")),
        lambda: NodeOptions(wait_seconds=-1),
        lambda: SshOptions(detach_seconds=1e12),
        lambda: slots_of(ENDLESS, NODES),
        lambda: slots_of("0000000001999999", NODES),
        lambda: slots_of("\u0663", NODES),
        lambda: class_number(ENDLESS, ("cat", "dog")),
        lambda: convert(["index", f"set-train-{{0..{ENDLESS}}}.tar"]),
        lambda: convert(["index", "{0..999999}/set-train-{0..999999}.tar"]),
    ],
    ids=range(22),
)
def test_no_number_is_too_long_to_be_refused_in_a_line(asked):
    """They ended in a traceback, or were taken: a host with 10**400 ranks."""
    with pytest.raises(Problem) as refused:
        asked()
    assert isinstance(refused.value, UsageError)
    assert len(str(refused.value)) < 250


def test_a_time_span_has_an_end():
    """A century and a second is none, in any unit."""
    assert seconds_in("36500d") == MOST_SECONDS
    for text in ("36500d1s", f"{MOST_SECONDS + 1}s", "36501d"):
        with pytest.raises(ValueError, match="more than a century"):
            seconds_in(text)
