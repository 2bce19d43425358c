"""What the server of training.nursery does before there is any loader worker: ignore, import."""

import atexit
import os
import signal

for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)

import training.data  # noqa: E402, F401

atexit.register(os._exit, 0)  # the server owns nothing, and its modules take long to end
