"""Ignore signals and import, in the server of training.data.worker_server, before any worker."""

import atexit
import os
import signal

for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)

import rackrun.training.data.open  # noqa: E402, F401

atexit.register(os._exit, 0)  # the server owns nothing, and its modules take long to end
