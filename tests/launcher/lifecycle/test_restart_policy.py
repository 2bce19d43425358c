"""Attempts after a failure: how many, on which hosts, from where."""

import sys
from pathlib import Path

import pytest

from rackrun.launcher.lifecycle.restart_policy import RestartPolicy, RestartState, resumed
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.run.job import Command, TaskWork
from rackrun.launcher.run.result import Result
from tests.lab.waiting import until

HOSTS = tuple(map(Host, "abcd"))


def failed(host: str, lost: str = "", exit_code: int = 75, verdict: str = "failed") -> Result:
    states = {name: "not verified" if name in lost else "clean" for name in "abcd"}
    rank = None if host in lost else 0
    return Result(
        verdict, exit_code, "", host, rank, None, 1.0, "", "", {}, states, {}, Path("runs/x")
    )


def names(course: RestartState | None) -> str:
    return "" if course is None else "".join(host.name for host in course.active())


def test_a_failed_run_is_tried_again_as_often_as_asked():
    """--max-restarts 2 is two more attempts on the same hosts, and no third."""
    first = RestartState(RestartPolicy(max_restarts=2), HOSTS)
    second = first.after(failed("b", exit_code=1))
    assert second is not None
    third = second.after(failed("c", exit_code=137))
    assert third is not None
    assert names(first) == names(second) == names(third) == "abcd"
    assert third.after(failed("a")) is None


@pytest.mark.parametrize(
    ("verdict", "code"),
    [("done", 0), ("interrupted", 130), ("failed", 64), ("failed", 65), ("failed", 78)],
)
def test_what_would_end_in_the_same_way_is_not_tried_again(verdict, code):
    """Success, Ctrl-C, bad usage, bad data, unfit hosts: there is no second attempt."""
    course = RestartState(RestartPolicy(max_restarts=9), HOSTS)
    assert course.after(failed("a", exit_code=code, verdict=verdict)) is None


def test_hosts_that_were_added_to_the_list_are_spares_and_those_taken_out_are_left_out():
    """So there are never more hosts than at first; a line that comes back counts again."""
    first = RestartState(RestartPolicy(max_restarts=9), HOSTS)
    edited = first.with_listed((*HOSTS[:2], HOSTS[3], Host("e"), Host("f")))
    assert names(edited) == "abde"
    following = edited.after(failed("d", lost="d"))
    assert names(following) == "abef"
    assert following is not None and [host.name for host in following.awaited] == ["d"]
    assert names(following.with_listed((*HOSTS, Host("f")))) == "abcf"
    assert following.with_listed(HOSTS[:2]).active() == ()


def test_a_spare_takes_the_place_of_a_lost_host():
    """The spares are the last hosts; without another spare a second loss ends it."""
    first = RestartState(RestartPolicy(max_restarts=9, spares=1), HOSTS)
    assert names(first) == "abc"
    second = first.after(failed("b", lost="b"))
    assert names(second) == "acd"
    assert second is not None
    assert second.after(failed("c", lost="c")) is None


def test_fewer_hosts_go_on_if_they_may():
    """--min-hosts 2 of 4: two may be lost, not three."""
    first = RestartState(RestartPolicy(max_restarts=9, min_hosts=2), HOSTS)
    second = first.after(failed("b", lost="bd"))
    assert names(second) == "ac"
    assert second is not None
    assert second.after(failed("c", lost="c")) is None


def test_a_host_that_failed_twice_is_not_used_again():
    """Its connection may be fine: what fails there twice would fail a third time."""
    course: RestartState | None = RestartState(RestartPolicy(max_restarts=9, spares=1), HOSTS)
    assert course is not None
    course = course.after(failed("b", exit_code=1))
    assert names(course) == "abc"
    assert course is not None
    assert names(course.after(failed("b", exit_code=1))) == "acd"


def test_a_host_that_is_found_unfit_costs_no_restart():
    """Nothing was started: others take its place, as long as there are enough of them."""
    course: RestartState | None = RestartState(
        RestartPolicy(max_restarts=1, spares=1, min_hosts=2), HOSTS
    )
    assert course is not None
    course = course.after(failed("b", lost="b"))
    assert names(course) == "acd"
    assert course is not None
    course = course.without({"a"})
    assert (names(course), course and course.restarts) == ("cd", 1)
    assert course is not None
    assert course.without({"c"}) is None


def test_a_lost_host_that_is_fit_again_takes_part_behind_the_others():
    """So rank 0 stays where it is; never more hosts than at first, and no restart is counted."""
    course: RestartState | None = RestartState(
        RestartPolicy(max_restarts=9, spares=1, min_hosts=1), HOSTS
    )
    for lost in "ab":
        assert course is not None
        course = course.after(failed(lost, lost=lost))
    assert course is not None
    assert (names(course), course.is_short) == ("cd", True)
    course = course.with_returned({"a"})
    assert (names(course), course.is_short, course.restarts) == ("cda", False, 2)
    assert names(course.with_returned({"b"})) == "cda"


def test_a_host_that_is_lost_often_comes_back_and_one_that_is_refused_twice_does_not():
    """Only what fails although the host is there would fail again."""
    course: RestartState | None = RestartState(RestartPolicy(max_restarts=9, min_hosts=1), HOSTS)
    for _ in range(3):
        assert course is not None
        course = course.after(failed("b", lost="b"))
        assert course is not None
        assert [host.name for host in course.awaited] == ["b"]
        course = course.with_returned({"b"})
    for awaited in (["b"], []):
        course = course.with_returned({"b"}).without({"b"})
        assert course is not None
        assert [host.name for host in course.awaited] == awaited


def test_a_task_goes_on_from_its_newest_run():
    """--resume names the run that saved last, in place of what was given."""
    task = TaskWork("catdog", ("--resume", "old", "--epochs", "3", "--resume=older"))
    assert resumed(task, "runs/new").options == ("--epochs", "3", "--resume", "runs/new")
    assert resumed(Command(("true",)), "runs/new") == Command(("true",))


def test_the_results_come_from_the_spare_that_took_over(start_lab):
    """The only host is lost and the spare becomes rank 0: what it wrote comes back, and its log."""
    lab = start_lab(2)
    folders = [lab.folder / "first", lab.folder / "spare"]
    python = f"python={lab.cheap_python()}"
    hosts = str(lab.write_hosts(*(f"{python} workdir={folder}" for folder in folders)))
    folders[0].mkdir()
    unfit, _, outputs = lab.result_of("--max-restarts", "1", "--spares", "1", hosts, "--", "true")
    assert unfit == 78, "a spare is looked at before it is needed"
    assert f"{lab.hosts[1].host.label}: workdir: there is no folder" in outputs
    folders[1].mkdir()
    code = (
        "import json, os, pathlib, socket, time; print('at', os.getcwd(), flush=True)\n"
        "os.getcwd().endswith('first') and time.sleep(999)\n"
        "final = pathlib.Path(os.environ['RACKRUN_RUN_FOLDER'], 'final.pt')\n"
        "final.write_text('weights'); ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "ear.connect(os.environ['RACKRUN_REPORTS'])\n"
        "ear.send(json.dumps({'rank': 0, 'phase': 'done', 'final': str(final)}).encode())"
    )
    args = ("--lease-seconds", "3", "--max-restarts", "1", "--spares", "1", hosts)
    process = lab.run_ssh(*args, "--", sys.executable, "-c", code)
    until(lambda: any(lab.folder.glob("runs/2*/logs/*/*/rank-0.out")), "rank 0 runs", 60)
    lab.hosts[0].stop()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"1 file came back from {lab.hosts[1].host.label}" in err
    newest = sorted((lab.folder / "runs").glob("2*"))[-1]
    assert (newest / "final.pt").read_text() == "weights"
    assert f"model: runs/{newest.name}/final.pt" in err
    (log,) = newest.glob("logs/*/2/rank-0.out")
    assert log.read_text() == f"at {folders[1]}\n"


def test_an_attempt_that_saved_nothing_is_no_obstacle(start_lab):
    """A task that failed at once is started anew with all its options and the earlier runs."""
    lab = start_lab(1)
    # Ranks start as: python -m rackrun.training catdog ...
    package = lab.folder / "cheap" / "rackrun" / "training"
    package.mkdir(parents=True)
    for folder in (package, package.parent):  # or the installed package would come first
        (folder / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import os, sys\n"
        "if 'check' in sys.argv: os._exit(0)\n"
        "print('options', *sys.argv[2:], flush=True)\n"
        "os._exit(0 if '--earlier-attempts' in sys.argv else 9)\n"
    )
    hosts = str(lab.write_hosts(f"python={lab.cheap_python()}"))
    options = ("--max-restarts", "1", "--env", f"PYTHONPATH={package.parents[1]}")
    code, out, err = lab.result_of(*options, hosts, "catdog", "--resume", "x", "--synthetic")
    assert code == 0, err
    folder = lab.run_folder().name
    lines = [line.split("options ")[1] for line in out.splitlines() if "options " in line]
    given = "--resume x --synthetic"
    assert lines == [given, f"{given} --earlier-attempts runs/{folder}"]
