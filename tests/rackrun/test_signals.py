"""Standard streams that the caller has closed, and signals that it ignores."""

import os
import signal
import subprocess
import sys

import pytest

from rackrun.signals import ended_by_a_signal, interruptible
from rackrun.training.stop_requests import StopRequests


@pytest.mark.parametrize(
    ("line", "closed", "code"),
    [
        ("convert --help", ">&-", 0),
        ("convert verify /nowhere", ">&- 2>&-", 64),
        ("catdog --help", ">&-", 0),
    ],
)
def test_closed_streams_are_no_error(line, closed, code):
    command = f'exec "$0" -m rackrun.{line} {closed}'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable], stderr=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize("handling", [interruptible, ended_by_a_signal, lambda: StopRequests(0)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_what_the_caller_ignores_stays_ignored(handling, number):
    """As under `nohup`, and in scripts behind `&`."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with handling():
            os.kill(os.getpid(), number)
            assert signal.getsignal(number) is signal.SIG_IGN
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
