"""Which hosts and GPUs a launch takes where it has a choice."""

import random

import pytest

from rackrun.launcher.lifecycle.choosing import HostOffer, pick_gpus, pick_hosts
from rackrun.launcher.run.hosts import Host


def offer(name: str, free: str, gpus: int = 4) -> HostOffer:
    """Return an offer of a host with GPUs of these numbers."""
    numbers = tuple(map(int, free))
    return HostOffer(Host(name), len(numbers) == gpus, gpus, numbers, gpus)


def taken(offers: list[HostOffer], count: int) -> dict[str, str] | None:
    """Return the numbers of the GPUs by host; "all" for a whole one."""
    hosts = pick_gpus(offers, count)
    if hosts is None:
        return None
    return {
        host.name: "all" if host.devices is None else "".join(map(str, host.devices))
        for host in hosts
    }


@pytest.mark.parametrize(
    ("free", "count", "expected"),
    [
        ({"a": "0123", "b": "0123"}, 4, {"a": "all"}),
        ({"a": "12", "b": "0123"}, 4, {"b": "all"}),
        ({"a": "12", "b": "0123"}, 6, {"a": "12", "b": "all"}),
        ({"a": "0123", "b": "13", "c": "2"}, 1, {"c": "2"}),
        ({"a": "0123", "b": "13", "c": "2"}, 2, {"b": "13"}),
        ({"a": "0123", "b": "13", "c": "2"}, 3, {"a": "012"}),
        ({"a": "0123", "b": "13", "c": "2"}, 7, {"a": "all", "b": "13", "c": "2"}),
        ({"a": "0123", "b": "13", "c": "2"}, 8, None),
        ({"a": "", "b": "3"}, 1, {"b": "3"}),
        ({}, 1, None),
    ],
)
def test_whole_hosts_come_first_and_others_stay_whole(free, count, expected):
    """The rest comes from the host with the fewest free GPUs that suffice."""
    assert taken([offer(*pair) for pair in free.items()], count) == expected


def test_a_large_host_is_better_than_two_small_ones():
    """Fewer hosts, less traffic between them."""
    offers = [offer("a", "0123"), offer("b", "0123"), offer("c", "01234567", gpus=8)]
    assert taken(offers, 8) == {"c": "all"}
    assert taken(offers, 12) == {"a": "all", "c": "all"}


def test_the_first_free_hosts_are_taken():
    """In their order; None if there are too few."""
    offers = [offer("a", "01"), offer("b", "0123"), offer("c", "0123")]
    picked = pick_hosts(offers, 1)
    assert picked is not None and [host.name for host in picked] == ["b"]
    assert pick_hosts(offers, 3) is None


def test_in_every_situation_exactly_that_many_free_gpus_are_taken():
    """2,000 random racks: never one that is not free, never too few if there are enough."""
    chance = random.Random(7)
    for _ in range(2000):
        offers = []
        for number in range(chance.randrange(1, 6)):
            gpus = chance.choice((1, 2, 4, 8))
            free = sorted(chance.sample(range(gpus), chance.randrange(gpus + 1)))
            numbers = "".join(map(str, free))
            offers.append(offer(f"h{number}", numbers, gpus))
        unused = sum(len(each.free) for each in offers)
        count = chance.randrange(1, 20)
        hosts = pick_gpus(offers, count)
        assert (hosts is None) == (unused < count)
        by_name = {each.host.name: each for each in offers}
        for host in hosts or ():
            picked = by_name[host.name]
            assert set(picked.free) >= set(picked.free if host.devices is None else host.devices)
            assert host.devices is not None or picked.is_whole
            assert host.slots == len(picked.free if host.devices is None else host.devices)
        assert sum(host.slots or 0 for host in hosts or ()) == (count if hosts else 0)
