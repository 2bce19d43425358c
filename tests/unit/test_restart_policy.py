"""Attempts after a failure: how many, on which hosts, from where."""

import re
from pathlib import Path

import pytest

from rackrun.launcher.lifecycle.restart_policy import RestartState, resumed
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.run.job import Command, TaskWork
from rackrun.launcher.run.result import Result

HOSTS = tuple(map(Host, "abcd"))


def failed(host, lost="", exit_code=75, verdict="failed"):
    states = {name: "not verified" if name in lost else "clean" for name in "abcd"}
    rank = None if host in lost else 0
    return Result(
        verdict, exit_code, "", host, rank, None, 1.0, "", "", {}, states, {}, Path("runs/x")
    )


def names(state):
    return "" if state is None else "".join(host.name for host in state.active())


EVENTS = {
    "fails": lambda state, hosts: state.after(failed(hosts, exit_code=1)),
    "lost": lambda state, hosts: state.after(failed(hosts[0], lost=hosts)),
    "unfit": lambda state, hosts: state.without(set(hosts)),
    "back": lambda state, hosts: state.with_returned(set(hosts)),
    "listed": lambda state, hosts: state.with_listed(tuple(map(Host, hosts))),
}
ANY = {"max_restarts": 9}
COURSES = {  # a policy: what happens to which hosts, and those that go on then
    "as often as asked": ({"max_restarts": 2}, "fails b: abcd, fails c: abcd, fails a: "),
    "a spare takes the place of a lost host": ({**ANY, "spares": 1}, "lost b: acd, lost c: "),
    "fewer go on if they may": ({**ANY, "min_hosts": 2}, "lost bd: ac, lost c: "),
    "one that failed twice is not used again": (
        {**ANY, "spares": 1},
        "fails b: abc, fails b: acd",
    ),
    "one that is unfit costs no restart": (
        {"max_restarts": 1, "spares": 1, "min_hosts": 2},
        "lost b: acd, unfit a: cd, unfit c: ",
    ),
    "one that is back stands behind the others, and there are never more than at first": (
        {**ANY, "spares": 1, "min_hosts": 1},
        "lost a: bcd, lost b: cd, back a: cda, back b: cda",
    ),
    "one that is lost often comes back, one that is refused twice does not": (
        {**ANY, "min_hosts": 1},
        "lost b: acd, back b: acdb, lost b: acd, back b: acdb, unfit b: acd, back b: acdb,"
        " unfit b: acd, back b: acd",
    ),
    "added ones are spares, those taken out are left out": (
        ANY,
        "listed abdef: abde, lost d: abef, listed abcdf: abcf",
    ),
}


@pytest.mark.parametrize("name", COURSES)
def test_which_hosts_go_on_after_what_happened(name):
    policy, course = COURSES[name]
    state = RestartState(HOSTS, **policy)
    for step in re.split(", *", course):
        event, hosts, active = re.fullmatch(r"(\w+) (\w+): (\w*)", step).groups()
        state = EVENTS[event](state, hosts)
        assert names(state) == active, step


@pytest.mark.parametrize(
    ("verdict", "code"),
    [("done", 0), ("interrupted", 130), ("failed", 64), ("failed", 65), ("failed", 78)],
)
def test_what_would_end_in_the_same_way_is_not_tried_again(verdict, code):
    """Success, Ctrl-C, bad usage, bad data, unfit hosts: there is no second attempt."""
    state = RestartState(HOSTS, max_restarts=9)
    assert state.after(failed("a", exit_code=code, verdict=verdict)) is None


def test_a_task_goes_on_from_its_newest_run():
    """--resume names the run that saved last, in place of what was given."""
    task = TaskWork("catdog", ("--resume", "old", "--epochs", "3", "--resume=older"))
    assert resumed(task, "runs/new").options == ("--epochs", "3", "--resume", "runs/new")
    assert resumed(Command(("true",)), "runs/new") == Command(("true",))
