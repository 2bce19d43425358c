"""Launchers that a scheduler starts one by one: they meet, run together, and end together."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from tests.lab.run import run
from tests.lab.waiting import until
from tests.lab.warm import ROOT
from tests.launcher.conftest import SAY, Nodes, ends, python

SAVE = """
import signal, sys, time
def save(number, frame):
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(100)
"""
STAND_STILL = """
import json, os, socket, sys, time
ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
ear.connect(os.environ["RACKRUN_REPORTS"])
rank = int(os.environ["RANK"])
phase = "train" if rank else sys.argv[1]
ear.send(json.dumps({"rank": rank, "phase": phase, "step": 1}).encode())
time.sleep(4)
"""


SAY_MUCH = "import sys; sys.stdout.write(f'{1:099}\\n' * 10_000)"  # more than a pipe takes

LOGS = "2*/logs/*/*/rank-*.out"


def ready(nodes: Nodes, ranks: int) -> None:
    """Wait until so many ranks have said something."""
    until(lambda: sum(log.stat().st_size > 0 for log in nodes.folder.glob(LOGS)) == ranks)


def test_nodes_agree_on_the_size_of_the_world_and_on_a_folder(nodes):
    """Slots 2, 1 and 4 that no scheduler knows together: seven ranks, each of them once."""
    for node, slots in enumerate((2, 1, 4)):
        nodes.start(node, 3, "--nproc", str(slots), *python(SAY))
    endings = ends(nodes.started)
    assert [code for code, _, _ in endings] == [0, 0, 0], endings
    lines = [line.split(" | ")[1] for _, out, _ in endings for line in out.splitlines()]
    assert sorted(lines) == [f"{rank} 7 {nodes.run}" for rank in range(7)]
    results = [json.loads(path.read_text()) for path in sorted(nodes.run.glob("result*.json"))]
    assert sorted(rank for result in results for rank in result["codes"]) == list("0123456")
    assert not nodes.left()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_to_every_process_does_no_harm(nodes, number, code):
    """Slurm signals launcher, agent, torchrun and rank alike: only the launcher acts on it."""
    processes = nodes.start_all(2, *python(SAVE))
    ready(nodes, 2)
    launchers = {process.pid for process in processes}  # forked: their environment has no mark
    for pid in {*nodes.left(), *launchers}:
        with contextlib.suppress(ProcessLookupError):  # one that only looked, and has ended
            os.kill(pid, number)
    endings = ends(processes)
    assert [ended[0] for ended in endings] == [code, code], endings
    assert all("saved" in out for _, out, _ in endings)
    assert not nodes.left()


SAVE_TWICE = """
import signal, time
signal.signal(signal.SIGTERM, lambda number, frame: print("saves", flush=True))
print("ready", flush=True)
time.sleep(2)
"""


def test_a_script_that_the_scheduler_has_told_to_end_is_not_told_again(nodes):
    """Slurm sends SIGTERM to the ranks as well: a second one would interrupt their save."""
    processes = nodes.start_all(2, *python(SAVE_TWICE))
    ready(nodes, 2)
    launchers = {process.pid for process in processes}
    for pid in {*nodes.left(), *launchers}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    endings = ends(processes)
    assert [out.count("saves") for _, out, _ in endings] == [1, 1], endings
    assert not nodes.left()


SAVE_SLOWLY = SAVE.replace('print("saved"', 'time.sleep(1); print("saved"')


def test_a_ctrl_c_that_every_node_gets_leaves_time_to_save(nodes):
    """Each launcher hears of it from the scheduler and from the other one: that is no second."""
    processes = nodes.start_all(2, *python(SAVE_SLOWLY))
    ready(nodes, 2)
    for process in processes:
        process.send_signal(signal.SIGINT)
    endings = ends(processes)
    assert [ended[0] for ended in endings] == [130, 130], endings
    assert all("saved" in out for _, out, _ in endings), endings
    assert not nodes.left()


@pytest.mark.parametrize("phase, code", [("save", 0), ("train", 75)])
def test_nodes_wait_for_a_rank_of_another_node(nodes, phase, code):
    """While one saves, those who wait for it do not hang; while all train, they do."""
    endings = ends(nodes.start_all(2, "--hang-seconds", "1", *python(STAND_STILL, phase)))
    assert [ended[0] for ended in endings] == [code, code], endings
    if code:
        assert "no progress" in endings[1][2]


@pytest.mark.parametrize(
    "node, master, line",
    [
        (1, "127.0.0.1", "does not answer"),
        (1, "no-such-host.invalid", "does not resolve"),
        (0, "127.0.0.1", "node 1 did not come within 1 s"),
    ],
)
def test_who_does_not_come_is_named_after_the_limit(nodes, node, master, line):
    """No answer, no name, no other node: 69, and nothing was started."""
    process = nodes.start(node, 2, "--wait-seconds", "1", "--master", master, *python(SAY))
    ((code, _, errors),) = ends([process])
    assert code == 69
    assert line in errors and "Traceback" not in errors
    assert not nodes.folder.exists()


def test_nodes_that_contradict_each_other_all_end(nodes):
    """Two with the same rank, or another number of nodes: 64 on each of them, and why."""
    first = nodes.start(0, 3, *python(SAY))
    nodes.start(1, 3, *python(SAY))
    nodes.start(1, 3, *python(SAY))
    endings = ends(nodes.started)
    assert [code for code, _, _ in endings] == [64, 64, 64], endings
    assert "both say that they are node 1" in endings[0][2]
    first = nodes.start(0, 2, *python(SAY))
    other = nodes.start(1, 3, *python(SAY))
    endings = ends([first, other])
    assert [code for code, _, _ in endings] == [64, 64], endings
    assert "is node 1 of 3, but node 0 is one of 2" in endings[0][2]


def test_a_node_of_another_job_is_turned_away_and_keeps_nobody_from_running(nodes, monkeypatch):
    """Two jobs have one port: 64 for the one that came second, and what to type."""

    def start(job, node):
        about = {"JOB_ID": job, "ARRAY_INDEX": node, "ARRAY_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
        for name, value in about.items():
            monkeypatch.setenv(f"NGC_{name}", str(value))
        return nodes.start(node, 2, "--port", str(nodes.port), "--nproc", "1", *python(SAY))

    first = start(7, 0)
    ((code, _, errors),) = ends([start(8, 1)])
    assert (code, "belongs to job 8, this is 7; type: --port N" in errors) == (64, True), errors
    assert [code for code, _, _ in ends([first, start(7, 1)])] == [0, 0]


@pytest.mark.parametrize(
    "first, second, line",
    [
        (("--", "train", "--lr", "0.1"), ("--", "train", "--lr", "0.5"), "from --lr 0.1 on"),
        (("--env", "LR=1", "--", "true"), ("--env", "LR=2", "--", "true"), "other --env"),
        (("--name", "a", "--", "true"), ("--name", "b", "--", "true"), "another --name"),
    ],
)
def test_nodes_that_would_run_something_else_all_end(nodes, first, second, line):
    """Another command, variable or name: 78 on each node, and which node has what."""
    endings = ends([nodes.start(0, 2, *first), nodes.start(1, 2, *second)])
    assert [code for code, _, _ in endings] == [78, 78], endings
    assert all("(node 1) has " in said and line in said for _, _, said in endings), endings
    assert not nodes.folder.exists()


def test_nodes_may_run_something_else_if_asked(nodes):
    """--ignore-check command, for a path that each node has elsewhere."""
    ignore = ("--ignore-check", "command")
    commands = (python(SAY), python(SAY, "more"))
    started = [nodes.start(node, 2, *ignore, *words) for node, words in enumerate(commands)]
    assert [code for code, _, _ in ends(started)] == [0, 0]


def test_a_port_that_is_taken_is_said(nodes):
    """78, and the option that chooses another one."""
    with socket.create_server(("127.0.0.1", nodes.port)):
        ((code, _, errors),) = ends([nodes.start(0, 2, *python(SAY))])
    assert code == 78
    assert f"port {nodes.port} of this node" in errors and "type: --port N" in errors


def test_a_signal_after_the_end_changes_nothing(nodes):
    """SIGUSR1 while the last output is still read: the run was done, and its code says so."""
    process = nodes.start(0, 1, *python(SAY_MUCH))
    until(lambda: list(nodes.folder.glob("2*/result.json")))
    process.send_signal(signal.SIGUSR1)
    ((code, out, errors),) = ends([process])
    assert (code, len(out)) == (0, 1_000_000), errors


LITTLE = """\
mount -t tmpfs -o size=64m none /dev/shm
mount -t tmpfs -o size=4m none /tmp
exec "$@"
"""


@pytest.mark.parametrize(("ignored", "code"), [((), 78), (("--ignore-check", "disk"), 0)])
def test_a_node_checks_its_own_machine(ignored, code):
    """What keeps ./run-ssh from starting on a host keeps a node from it, unless it is allowed."""
    here = {"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    typed = [sys.executable, "-m", "rackrun", "./run-node", "--runs", "/dev/shm", *ignored]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", LITTLE, "sh", *typed, "--", "true"],
        cwd=ROOT,
        env={**os.environ, **here},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    assert "disk: /tmp is full; an agent keeps its files" in done.stderr
    assert code == 78 or "limits: /dev/shm has 64 MiB free" in done.stderr


@pytest.mark.parametrize("options", ["", "--force"])
def test_where_a_run_of_nodes_ends_is_named_elsewhere(nodes, tmp_path, options):
    """A login node shares the folder, and can reach no launcher."""
    nodes.start_all(2, *python(SAY))
    ends(nodes.started)
    shared = tmp_path / "shared" / nodes.run.name
    shutil.copytree(nodes.run, shared, ignore=shutil.ignore_patterns("result*", "state*"))
    for path in shared.glob("events*.jsonl"):  # as if it were still running
        path.write_text(path.read_text().splitlines()[0] + "\n")
    stopped = run(f"rackrun stop {options} {shared}", tmp_path)
    assert stopped.code == 64 and "scancel JOB" in stopped.err, stopped
