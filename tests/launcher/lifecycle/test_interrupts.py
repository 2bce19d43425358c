"""Ctrl-C on a terminal lets a real task save, and the line that is printed continues it."""

import re
import shlex
import signal
import time

from tests.lab.hosts import BUSY, ROOT
from tests.lab.run import Terminal
from tests.lab.waiting import until

GRACE_BOUND_SECONDS = BUSY * 30.0


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
