"""Standard streams that the caller has closed, and signals that it ignores."""

import os
import signal

import pytest

from rackrun.signals import ended_by_a_signal, interruptible
from rackrun.training.stop_requests import StopRequests


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
