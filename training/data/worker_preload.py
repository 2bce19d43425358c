"""Ignore signals and import, in the server of training.data.worker_server, before any worker.

Imports are not garbage-collected: that would take time here, as it does in `training.entry`, and
in workers (see `worker_init`) it would copy the memory that they share.
"""

import atexit
import gc
import os
import signal

for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)

gc.disable()
import rackrun.training.data.open  # noqa: E402, F401

atexit.register(os._exit, 0)  # the server owns nothing, and its modules take long to end
