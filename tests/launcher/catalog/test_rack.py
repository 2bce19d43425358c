"""The rack: who uses what, and hosts that are out of use."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.lab.hosts import ROOT, Lab
from tests.lab.needs import need
from tests.lab.simulated_gpus import OLDER, SLEEP, SimulatedRack
from tests.lab.waiting import until

TRUE = ("--", "true")


@pytest.fixture
def rack(start_lab: Callable[[int], Lab]) -> SimulatedRack:
    """Return two hosts with two GPUs each, and one without any."""
    need("root")
    return SimulatedRack(start_lab(0), (2, 2, 0))


def test_the_table_has_runs_queue_and_health(rack):
    """Which GPUs are used, by whom, since when, for which run; who waits; what is sick."""
    rack.set_gpu("gpu02", 1, OLDER)
    hosts = str(rack.hosts)
    night = rack.lab.run_ssh("--include", "gpu01:1", "--name", "night", hosts, *SLEEP)
    until(lambda: any(rack.lab.folder.glob("runs/2*-night/logs/gpu01/1/rank-0.out")), "it runs", 60)
    waiting = rack.lab.run_ssh("--include", "gpu01", "--wait", hosts, *TRUE)
    until(lambda: rack.inspect()["gpu01"]["queue"], "it waits", 60)
    state = rack.inspect()
    (use,) = state["gpu01"]["uses"]
    assert (use["part"], use["name"].endswith("-night")) == (".gpu1", True)
    assert 0 < time.time() - use["since"] < 600
    assert [host["free"] for host in state.values()] == [[0], [0], []]
    code, out, err = rack.result_of(hosts, verb="rack")
    assert code == 0, err
    rows = {line[3:8]: line for line in out.splitlines() if line[3:6] == "gpu"}
    assert rows["gpu01"].split()[1:7] == ["2", "H100", "80GB", "HBM3", "1:", "0"]
    assert f"GPU 1: {use['user']}, night, " in rows["gpu01"]
    assert rows["gpu02"].startswith("!")
    assert "\ngpu02: " in out and "2 uncorrected ECC errors" in out
    assert rows["gpu03"].split()[1:3] == ["-", "yes"]
    assert "3 hosts, 2 of 4 GPUs free, 1 launch in the queue" in out
    for process in (waiting, night):
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)


def test_a_host_that_root_has_drained_is_refused_with_the_reason(start_lab):
    """The first line of /etc/rackrun/drained there: --check and launches end with 78."""
    rack = SimulatedRack(start_lab(0), (2, 2), drained="gpu02", why="fan is \x1b[2J broken")
    hosts = str(rack.hosts)
    code, _, err = rack.result_of(hosts, *TRUE)
    assert code == 78, err
    assert "gpu02: drained: fan is \u241b[2J broken; leave it out with --exclude" in err
    assert rack.result_of("--include", "gpu02", "--ignore-check", "drained", hosts, *TRUE)[0] == 0
    code, out, _ = rack.result_of("--check", "--json", hosts)
    rows = {row["host"]: row for row in json.loads(out) if row["check"] == "drained"}
    assert code == 78 and list(rows) == ["gpu02"]
    state = rack.inspect()["gpu02"]
    assert (state["free"], state["drained"]) == ([], "fan is \x1b[2J broken")
    assert "gpu02: drained: fan is " in rack.result_of(hosts, verb="rack")[1]
    code, _, err = rack.result_of("--hosts-needed", "1", "--exclude", "gpu01", hosts, *TRUE)
    assert (code, "1 host needed, 0 free and fit" in err) == (78, True), err
    assert rack.result_of("--gpus-needed", "2", hosts, *TRUE)[0] == 0
    spare = ("--max-restarts", "1", "--spares", "1", "--dry-run", "--json")
    code, out, err = rack.result_of(*spare, hosts, *TRUE)
    assert [host["name"] for host in json.loads(out)["hosts"]] == ["gpu01"], err


def test_the_table_is_drawn_again_on_a_terminal_until_ctrl_c(rack):
    """It shows what has changed meanwhile; Ctrl-C is a good end, without a traceback, and leaves
    the last table in the terminal."""
    leading, following = pty.openpty()
    args = ("--ssh-config", str(rack.lab.config), str(rack.hosts))
    env = {**os.environ, "HOME": str(rack.lab.home), "TERM": "xterm", "COLUMNS": "160"}
    process = subprocess.Popen(
        [sys.executable, "-m", "rackrun", "rack", *args],
        **dict.fromkeys(("stdin", "stdout", "stderr"), following),
        env={**env, "PYTHONPATH": str(ROOT)},
    )
    os.close(following)
    output = b""

    def shows(text: bytes) -> bool:
        nonlocal output
        output += os.read(leading, 65536)
        return text in output

    until(lambda: shows(b"4 of 4 GPUs free"), "the first table", 60)
    rack.set_gpu("gpu01", 0, OLDER)
    until(lambda: shows(b"3 of 4 GPUs free"), "a newer one", 60)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):
        while data := os.read(leading, 65536):
            output += data
    assert process.wait(30) == 0
    assert b"Traceback" not in output
    screen, _, left = output.rpartition(b"\x1b[?1049l")  # the end of the alternate screen
    assert b"\x1b[?1049h" in screen and b"3 of 4 GPUs free" in left
    os.close(leading)
