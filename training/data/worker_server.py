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
import multiprocessing.util
import os
import signal
import threading

CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = "training.data.worker_preload"
CONTEXT.set_forkserver_preload([PRELOAD])

# After a rank is killed, multiprocessing's resource tracker would print a warning last.
QUIET = "ignore::UserWarning:multiprocessing.resource_tracker"
WARNINGS = os.environ.get("PYTHONWARNINGS", "")
if QUIET not in WARNINGS:
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [WARNINGS, QUIET]))


def open_nursery(task: str) -> None:
    """Start the server now, which imports what workers need, for the task in this module too."""
    CONTEXT.set_forkserver_preload([PRELOAD, task])
    multiprocessing.forkserver.ensure_running()


def worker_init(worker: int) -> None:
    """Initialise a loader worker: leave signals to the rank, and end when it has ended.

    Ctrl-C and schedulers reach every process; the rank ends its step, and only then its workers.
    multiprocessing has given SIGINT its usual effect back, and torch SIGTERM.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # what the server has imported stays shared
    gc.enable()
    threading.Thread(target=_end_with_the_rank, daemon=True).start()


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


def close_nursery() -> None:
    """Leave no worker, semaphore or folder of sockets, as the interpreter's exit would.

    The server ends once its last client has gone.
    """
    end_workers()
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
