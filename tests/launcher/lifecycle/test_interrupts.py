"""Ctrl-C over SSH: once lets a task save, twice ends all at once, whatever the hosts are doing."""

import json
import re
import shlex
import signal
import subprocess
import time

from tests.lab.hosts import APART, BUSY, ROOT, SHORT, WAIT
from tests.lab.run import Terminal
from tests.lab.waiting import until

TWICE_BOUND_SECONDS = BUSY * 5.0
GRACE_BOUND_SECONDS = BUSY * 30.0


def interrupted_twice(process: "subprocess.Popen[str]") -> tuple[str, float]:
    """Interrupt a launcher twice; return its output and the seconds since the first Ctrl-C."""
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    return err, time.monotonic() - began


def test_a_run_that_has_a_plan_gets_a_result(start_lab):
    """Ctrl-C in the moment in which plan.json appears, before anything is started on a host."""
    lab = start_lab(1)
    for _ in range(3):
        ended = set((lab.folder / "runs").glob("2*/plan.json"))
        process = lab.run_ssh(lab.cheap_hosts(), *WAIT)
        while not (plans := set((lab.folder / "runs").glob("2*/plan.json")) - ended):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert json.loads(plans.pop().with_name("result.json").read_text())["exit_code"] == 130


def test_twice_with_a_host_that_is_cut_off(pair):
    """130 in time, the other host clean; the line to type looks at the host when it is back."""
    home = {"HOME": str(pair.folder / "home")}
    args = ("--lease-seconds", "15", "--checkpoint-seconds", "60", pair.cheap_hosts(), *WAIT)
    process = pair.run_ssh(*args, env=home)
    pair.started(2)
    pair.pull_cable(2)
    err, took = interrupted_twice(process)
    assert process.returncode == 130, err
    assert took < TWICE_BOUND_SECONDS, err
    states = pair.result()["hosts"]
    assert states["node1"] == "clean"
    assert states["node2"] == "not verified: did not confirm its end"
    run = json.loads((pair.run_folder() / "plan.json").read_text())["run_id"]
    assert f"once node2 can be reached, type: ./run-ssh stop {run[:8]}\n" in err
    assert "rackrun: node2: not verified: " in err
    assert err.splitlines()[-1] == "rackrun: interrupted: stopped by Ctrl-C"
    code, _, err = pair.result_of(run[:8], verb=("attach",), env=home)
    assert (code, "was attached and is over" in err) == (64, True), err
    pair.plug_cable(2)
    code, _, err = pair.result_of(run[:8], verb=("stop",), env=home)
    assert code == 0, err
    assert "2 of 2 hosts clean: nothing left running" in err
    assert len(pair.hosts[1].processes()) == 0


def test_twice_during_the_look_with_a_host_that_is_cut_off(pair):
    """Nothing was started yet: 130 in time, no run folder, and the host that answers is clean."""
    hosts = pair.cheap_hosts()
    python = pair.folder / "python"
    text = python.read_text()
    python.write_text(
        text.replace("#!/bin/sh\n", f"#!/bin/sh\ntouch {pair.folder}/asked; sleep 9\n")
    )
    process = pair.run_ssh(*SHORT, hosts, "--", "true")
    until((pair.folder / "asked").exists, "the look begins", 60)
    pair.pull_cable(2)
    err, took = interrupted_twice(process)
    assert process.returncode == 130, err
    assert took < TWICE_BOUND_SECONDS, err
    assert err == "interrupted\n"
    assert not (pair.folder / "runs").exists()


def test_twice_while_ranks_start(start_lab):
    """The plan is written, torchrun takes its time: 130 in time, and every host is as before."""
    lab = start_lab(2, APART)
    before = [set(host.processes()) for host in lab.hosts]
    hosts = lab.cheap_hosts()
    python = lab.folder / "python"
    python.write_text(python.read_text().replace("shift 2; exec", "sleep 98767; shift 2; exec"))
    process = lab.run_ssh("--checkpoint-seconds", "60", hosts, *WAIT)
    until(
        lambda: all("sleep\x0098767\0" in host.processes().values() for host in lab.hosts),
        "torchrun is about to start",
        60,
    )
    err, took = interrupted_twice(process)
    assert process.returncode == 130, err
    assert took < TWICE_BOUND_SECONDS, err
    assert set(lab.result()["hosts"].values()) == {"clean"}
    until(lambda: [set(host.processes()) for host in lab.hosts] == before, "all is gone", 5)


def test_once_lets_a_real_task_save(start_lab):
    """A task on a host, a terminal, one Ctrl-C: a checkpoint, in time, and the command to type.

    Pasted as it is printed, with a rate of its own behind it, it continues this very run and says
    what has changed.
    """
    lab = start_lab(1)
    hosts = lab.write_hosts(
        f"python={lab.cheap_python(trains=True)} workdir={ROOT} env=OMP_NUM_THREADS=1"
    )
    terminal = Terminal(columns=200)
    task = (
        "catdog",
        "--recipe",
        "demo",
        "--synthetic",
        "--image-size",
        "32",
        "--steps-per-epoch",
        "9999",
    )
    process = lab.run_ssh(
        *("--ignore-check", "code", "--runs", str(lab.folder / "runs"), "--name", "a b"),
        *(str(hosts), *task),
        cwd=ROOT,
        env={"TERM": "xterm-256color"},
        **terminal.streams,
    )
    until(lambda: terminal.shows("training"))
    until(lambda: terminal.shows("images/s"))
    began = time.monotonic()
    terminal.type(b"\x03")
    until(lambda: (terminal.text() and False) or process.poll() is not None)
    assert process.returncode == 130, terminal.text()
    assert time.monotonic() - began < GRACE_BOUND_SECONDS
    assert terminal.shows("interrupted: stopped by Ctrl-C")
    assert terminal.restored()
    assert lab.result()["codes"] == {"0": 143}, terminal.text()
    assert set(lab.result()["hosts"].values()) == {"clean"}
    assert any(lab.run_folder().glob("checkpoints/step-*.pt"))
    printed = lab.result()["resume"]
    shown = "".join(terminal.text().split())  # a blank at the end of a row is not to be seen
    assert f"tocontinue,type:{''.join(printed.split())}" in shown
    program, *args = shlex.split(printed)
    (first,) = (lab.folder / "runs").glob("*-a_b")
    assert (program, args[-1]) == ("./run-ssh", str(first))
    again = lab.launcher(*args, "--lr", "0.5", cwd=ROOT)
    assert again.stdout is not None
    lines = iter(again.stdout.readline, "")
    resumed = next(line for line in lines if line.startswith("resumed"))
    changed = next(lines)
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=60)
    assert re.match(rf"resumed after step [1-9]\d* of {first}/checkpoints/", resumed)
    assert changed.startswith("settings changed since the checkpoint: --lr 0.5 here, 0.003 in")
