"""A script reports its progress in a line, which costs it nothing and never fails."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rackrun import report
from rackrun.reports import _script_reporter

ROOT = Path(__file__).parents[2]


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Yield the launcher's end of the reports, for a rank that has not reported."""
    path = tmp_path / "reports"
    monkeypatch.setenv("RACKRUN_REPORTS", str(path))
    monkeypatch.setenv("RANK", "3")
    _script_reporter.cache_clear()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        receiver.settimeout(30)
        yield receiver
    _script_reporter.cache_clear()


def test_a_change_of_phase_is_sent_at_once_with_all_that_is_known(launcher):
    """Scalars of NumPy are numbers; what is no number is none, and harms no other field."""
    report(step=1, loss=0.5)
    report(step=np.int64(2), loss=np.float32(0.25), accuracy=object())
    report(phase="save")
    first = {"rank": 3, "phase": "train", "step": 1, "loss": 0.5}
    last = {"rank": 3, "phase": "save", "step": 2, "loss": 0.25, "accuracy": None}
    sent = json.loads(launcher.recv(4096)), json.loads(launcher.recv(4096))
    assert sent == (first, last)


def test_a_rank_that_is_no_number_a_full_socket_and_no_launcher_are_no_error(launcher, monkeypatch):
    """Training goes on in every case."""
    for step in range(2000):
        report(phase=str(step))
    launcher.close()
    report(phase="done")
    _script_reporter.cache_clear()
    monkeypatch.setenv("RANK", "first")
    report(step=1)
    monkeypatch.delenv("RACKRUN_REPORTS")
    report(step=1)


def test_what_was_held_back_is_sent_at_the_end_and_torch_is_not_imported(launcher):
    """A script of a thousand quick steps: few datagrams, and the last one has its last step."""
    script = (
        "import sys; from rackrun import report\n"
        "for step in range(1, 1001): report(step=step)\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env={**os.environ}, check=True)
    launcher.setblocking(False)
    steps = []
    try:
        while True:
            steps.append(json.loads(launcher.recv(4096))["step"])
    except BlockingIOError:
        pass
    assert (steps[0], steps[-1]) == (1, 1000)
