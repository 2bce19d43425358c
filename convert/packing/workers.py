"""Jobs done side by side by forked processes, which never outlive the one that started them."""

import mmap
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import numpy as np

from rackrun.convert.progress import Show, meter
from rackrun.errors import Problem
from rackrun.signals import end_with
from rackrun.terminal import one_line

SHOWN_SECONDS = 0.2  # between two looks at what is done
ENDING = (signal.SIGINT, signal.SIGTERM)
NOTE = np.dtype([("pid", "i8"), ("images", "i8"), ("item", "S1000")])

Job = TypeVar("Job")
Result = TypeVar("Result")

# A worker killed by SIGKILL sends no message any more: what it works on and what it has done stand
# in memory that its parent reads, a note for each job. Set in each worker, as it begins.
_notes: Any = None
_note: Any = None
_jobs: Sequence[Any] = ()
_work: Callable[[Any], Any]


def in_parallel(
    jobs: Sequence[Job],
    work: Callable[[Job], Result],
    workers: int,
    verb: str,
    total: int | None,
) -> list[Result]:
    """Do all jobs and return their results, which are pickled, in the order of the jobs.

    Progress is shown meanwhile: `verb` is what happens to the `total` images that `working_on` is
    called for. The first Problem of any job ends them all, and so does an interrupt: workers are
    killed, and have all ended when this returns or raises. What they leave half done, the caller
    removes.
    """
    if not jobs:
        return []
    notes = np.frombuffer(mmap.mmap(-1, len(jobs) * NOTE.itemsize), NOTE)
    # Forked, so that jobs, open archives and their listings are there without being pickled.
    pool = ProcessPoolExecutor(
        min(workers, len(jobs)),
        multiprocessing.get_context("fork"),
        _begin,
        (os.getpid(), notes, jobs, work),
    )
    others, crew = set(multiprocessing.active_children()), set[BaseProcess]()
    futures = list[Future[Result]]()
    try:
        # All workers are forked by the first job that is submitted, before the meter begins: rich
        # draws its bar in a thread, and a fork would copy the locks that this thread holds.
        # Signals wait meanwhile: until a worker has its own handlers, it has those of its parent.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            futures += (pool.submit(_do, number) for number in range(len(jobs)))
            crew |= set(multiprocessing.active_children()) - others
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with meter(verb, total) as show:
            _wait(futures, notes, show)
        pool.shutdown()
        return [future.result() for future in futures]
    except BrokenProcessPool:
        pool.shutdown()  # the others have been ended, too; now all have exit codes
        raise _death(crew, notes) from None
    finally:
        for process in crew:  # none is left after a good end
            process.kill()
            process.join()
        pool.shutdown(cancel_futures=True)


def working_on(item: str, images: int = 1) -> None:
    """Note what this worker begins, so that its death can be attributed to it, and count images."""
    if _note is not None:
        _note["item"] = item.encode(errors="replace")
        _note["images"] += images


def _wait(futures: Sequence[Future[Any]], notes: Any, show: Show) -> None:
    """Show progress until all jobs are done; raise the Problem of the first that fails."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, SHOWN_SECONDS, FIRST_COMPLETED)
        show(int(notes["images"].sum()))
        for future in done:
            future.result()


def _death(crew: Iterable[BaseProcess], notes: Any) -> Problem:
    """Return the error for the worker that ended by itself; the pool has ended the others."""
    ended = [process for process in crew if process.exitcode not in (0, -signal.SIGTERM)]
    exit_code = (ended[0].exitcode or 0) if ended else -signal.SIGTERM
    items = notes["item"][notes["pid"] == ended[0].pid] if ended else []
    item = one_line(items[0].decode(errors="replace")) if len(items) else ""
    reason, remedy = f"exit code {exit_code}", "run the same command again"
    if exit_code == -signal.SIGKILL:
        reason += ", SIGKILL: out of memory, or killed by hand"
        remedy += "; if it dies again, with a smaller --workers"
    elif exit_code < 0:
        reason += f", {signal.Signals(-exit_code).name}: a crash in a library that reads images"
        remedy += "; if it dies there again, remove that image from the source" if item else ""
    return Problem(f"{item}{': ' if item else ''}a worker process died ({reason}); {remedy}")


def _begin(parent: int, notes: Any, jobs: Sequence[Any], work: Callable[[Any], Any]) -> None:
    global _notes, _jobs, _work
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C the parent alone takes note
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # at once: the parent clears up
    _notes, _jobs, _work = notes, jobs, work
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def _do(number: int) -> Any:
    global _note
    _note = _notes[number]
    _note["pid"] = os.getpid()
    try:
        return _work(_jobs[number])
    finally:
        _note["pid"] = 0  # a worker that is killed between two jobs has none to name
