"""Saving while the main thread waits for a rank that is lost.

An exchange whose peer has stopped, or is behind a cut cable, ends after minutes or never, and
Python runs signal handlers only between two of its own instructions. The C part of the handler
writes the number of the signal to a pipe at once (signal.set_wakeup_fd), which a thread reads.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

from rackrun.errors import SaveError
from rackrun.terminal import say
from rackrun.training.stop_requests import STOP, StopRequests
from rackrun.training.training_run import TrainingRun

NOTICE_SECONDS = 1.5, 3.5  # at least, at most, to take the signal; the launcher kills after 5
_POLL_SECONDS = 0.05


@contextmanager
def saves_while_hung(run: TrainingRun) -> Iterator[None]:
    """At a SIGTERM that the main thread does not take, save and end this process with 143.

    Within a backward no signal is taken either: the main thread gets the time for a step. On a GPU,
    steps that are counted here may not have been computed: nothing is saved.
    """
    if run.ranks.world == 1 or run.ranks.device.type != "cpu":
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = Thread(target=_watch, args=(reader, run), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()
        os.close(reader)


def _watch(reader: int, run: TrainingRun) -> None:
    least, most = NOTICE_SECONDS
    while number := os.read(reader, 1):
        seconds = min(max(least, 1.5 * run.state.step_seconds), most)
        if number[0] == signal.SIGTERM and not _is_taken(run.requests, seconds):
            try:
                run.checkpoints.keep_step(run.state)
            except SaveError as error:
                say(str(error))
            if not run.requests.ending:
                os._exit(STOP + signal.SIGTERM)


def _is_taken(requests: StopRequests, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not requests.ending and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    return bool(requests.ending)
