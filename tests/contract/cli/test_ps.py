"""Runs are listed, and found by id, name or folder, from what each left in its folder."""

import fcntl
import json
import os
from contextlib import contextmanager

import pytest

from tests.lab.run import run, write

ID = {"live": "a1" * 16, "done": "b2" * 16, "broken": "c3" * 16, "killed": "d4" * 16}
RESULTS = {
    "done": {"verdict": "done", "exit_code": 0, "report": {"step": 90}},
    "broken": {"verdict": "failed", "exit_code": 75, "report": {"step": 7}},
}


def plan(run_id, name="gpu01"):
    """Return plan.json of a run of catdog on one host."""
    host = {
        **{"name": name, "address": "10.0.0.7", "processes": 1, "python": "/v/python"},
        **{"workdir": "/w", "folder": "/x", "node": 0, "first_rank": 0, "torchrun": []},
        **{"command": ["/v/python", "-u", "-m", "rackrun.training", "catdog"]},
        **{"environment": [], "defaults": [], "scratch": "/tmp/x"},
    }
    return json.dumps({"run_id": run_id, "world_size": 1, "hosts": [host]})


def folder_of(name, day=1):
    """Return the path of the run folder of a name."""
    return f"runs/2026010{day}-000000-{name}"


@contextmanager
def supervised(folder):
    """Hold the lock that the launcher of a living run holds."""
    with (folder / "events.jsonl").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def runs(tmp_path):
    """Write four runs, one of which is damaged beside them, and return the folder."""
    files = {f"{folder_of(name)}/plan.json": plan(run_id) for name, run_id in ID.items()}
    files |= {f"{folder_of(name)}/result.json": json.dumps(RESULTS[name]) for name in RESULTS}
    files[f"{folder_of('live')}/metrics.jsonl"] = '{"step": 20}\n{"step": 40}\n{"ste'
    files |= {f"{folder_of('empty')}/": "", f"{folder_of('damaged')}/plan.json": '{"run_id": "x'}
    write(tmp_path, files)
    return tmp_path


def test_the_list_has_each_run_with_its_state_and_step(runs, cli):
    with supervised(runs / folder_of("live")):
        listed = {run["name"]: run for run in json.loads(cli("rackrun ps --json").out)}
        lines = cli("rackrun ps").out.splitlines()
    shown = {name: (run["state"], run["exit_code"], run["step"]) for name, run in listed.items()}
    assert shown == {
        "live": ("running", None, 40),
        "done": ("done", 0, 90),
        "broken": ("failed", 75, 7),
        "killed": ("killed", None, None),
    }
    assert (listed["live"]["task"], listed["live"]["folder"]) == ("catdog", folder_of("live"))
    assert lines[0].split() == ["id", "name", "task", "hosts", "state", "step", "age", "folder"]
    assert any("failed (75)" in line for line in lines)


def test_names_of_hosts_move_no_cursor(tmp_path, cli):
    write(tmp_path, {f"{folder_of('one')}/plan.json": plan("a1" * 16, "\x1b[2J\ngpu01")})
    result = cli("rackrun ps")
    assert (result.code, len(result.out.splitlines()), "\x1b" in result.out) == (0, 4, False)


def test_all_nodes_of_a_run_that_was_started_node_by_node_are_named(tmp_path, cli):
    folder = folder_of("job")
    for node, name in enumerate(("n1", "n2")):
        suffix = f"-node{node}" if node else ""
        ending = {"verdict": "failed", "exit_code": 75, "hosts": {name: ("clean", "lost")[node]}}
        files = {f"{folder}/plan{suffix}.json": plan("a1" * 16, name)}
        files |= {f"{folder}/result{suffix}.json": json.dumps(ending)}
        write(tmp_path, files | {f"{folder}/logs/{name}/1/rank-{node}.out": f"rank {node}\n"})
    (listed,) = json.loads(cli("rackrun ps --json").out)
    states = json.loads(cli("rackrun status job --json").out)["hosts"]
    assert listed["hosts"] == ["n1", "n2"]
    assert {host["name"]: host["state"] for host in states} == {"n1": "clean", "n2": "lost"}
    assert cli("rackrun logs job --host n2").out == "n2:1 | rank 1\n"


@pytest.mark.parametrize(
    "typed", ["done", "b2b2b2", "b2" * 16, folder_of("done"), folder_of("done")[5:], "latest"]
)
def test_a_run_is_found_by_its_name_its_id_and_its_folder(typed, runs, cli):
    (runs / "done").mkdir()  # a folder of the user's: no run
    (runs / "runs" / "latest").symlink_to(folder_of("done")[5:])
    result = cli(f"rackrun report {typed}")
    assert result.code == 0, result
    assert (runs / folder_of("done") / "report.html").exists()


def test_of_several_runs_of_a_name_the_one_that_goes_on_is_meant(runs, cli):
    write(runs, {f"{folder_of('live', 2)}/plan.json": plan("e5" * 16)})
    with supervised(runs / folder_of("live")):
        status = cli("rackrun status live --json")
    assert json.loads(status.out)["run"] == ID["live"], status


def test_without_a_run_the_only_one_that_is_running_is_meant(runs, cli):
    write(runs, {f"{folder_of('live')}/logs/gpu01/1/rank-0.out": "here\n"})
    assert "none is running" in cli("rackrun logs").err
    with supervised(runs / folder_of("live")):
        shown = cli("rackrun logs")
        stopped = cli("rackrun stop")
        with supervised(runs / folder_of("killed")):
            unclear = cli("rackrun logs")
    assert (shown.code, shown.out, "a1a1a1a1 (live)" in shown.err) == (0, "here\n", True), shown
    assert (stopped.code, "RUN: missing" in stopped.err) == (64, True), stopped
    assert (unclear.code, "2 are running" in unclear.err) == (64, True), unclear


def test_a_run_below_a_folder_whose_name_is_not_utf_8_ends_well(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    ended = run("./run-local -- sleep 1.5", folder)
    assert ended.code == 0, ended
