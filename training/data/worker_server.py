"""Fork a rank's loader workers from a server: one thread, and all that they need imported.

A rank has threads, gloo's among them, and a process that is forked beside threads may never wake
up: it waits for a lock that a thread held, and has no such thread. (CPython 3.11 has one for its
list of threads, which a thread of gloo takes when it drops a tensor: one evaluation in some
hundreds never began.) So a server forks them. It is started before the rank imports torch, and
imports it beside the rank.

The server and the workers ignore signals that ask processes to end. They end with the rank.
"""

import gc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from rackrun.contract import variables

CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = "rackrun.training.data.worker_preload"
CONTEXT.set_forkserver_preload([PRELOAD])

MALLOC = {
    "MALLOC_TRIM_THRESHOLD_": 256 << 20,  # free memory that is kept
    "MALLOC_MMAP_THRESHOLD_": 32 << 20,  # from when on memory is not the heap's
}
"""What glibc reads as the server starts, in bytes: workers keep the memory that they free. Else
every group of images would take it from the kernel again."""

# After a rank is killed, multiprocessing's resource tracker would print a warning last.
QUIET = "ignore::UserWarning:multiprocessing.resource_tracker"
WARNINGS = os.environ.get("PYTHONWARNINGS", "")
if QUIET not in WARNINGS:
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [WARNINGS, QUIET]))
for name, size in MALLOC.items():
    os.environ.setdefault(name, str(size))


def start_worker_server(task: str) -> None:
    """Start the server now, which imports what workers need, for the task in this module too."""
    CONTEXT.set_forkserver_preload([PRELOAD, task])
    if of_agent := os.environ.get(variables.REPORTS):
        # Beside it, the folder of the server's socket is removed even if this rank is killed.
        tempfile.tempdir = str(Path(of_agent).parent)
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.forkserver.ensure_running()
    tempfile.tempdir = None  # as usual


def worker_init(worker: int) -> None:
    """Initialise a loader worker: leave signals to the rank, and end when it has ended.

    Ctrl-C and schedulers reach every process; the rank ends its step, and only then its workers.
    multiprocessing has given SIGINT its usual effect back, and torch SIGTERM.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _stay_beside_the_rank()
    gc.freeze()  # what the server has imported stays shared: collections would write to it
    threading.Thread(target=_end_with_the_rank, daemon=True).start()


def _stay_beside_the_rank() -> None:
    """Run on the cores that the rank is bound to: the server was started before it was."""
    rank = multiprocessing.parent_process()
    if rank and rank.pid and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(0, os.sched_getaffinity(rank.pid))


def _end_with_the_rank() -> None:
    """Exit after the rank: torch watches the parent, which is the server and outlives the rank."""
    rank = multiprocessing.parent_process()
    assert rank
    rank.join()
    os._exit(1)


def end_workers() -> None:
    """Kill the loader workers that are left; they ignore every weaker signal."""
    for worker in multiprocessing.active_children():
        worker.kill()
