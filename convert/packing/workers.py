"""Jobs done side by side by forked processes, which never outlive the one that started them."""

import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple, NoReturn, TypeVar

from rackrun.convert.progress import Progress, meter
from rackrun.errors import Problem
from rackrun.signals import end_with
from rackrun.terminal import one_line

GRACE_SECONDS = 5.0
REPORT_SECONDS = 0.2
TITLE_BYTES = 1024

# A worker killed by SIGKILL sends no message any more: what it works on has to stand in memory
# that its parent can read already.
_title: mmap.mmap | None = None

Job = TypeVar("Job")
Result = TypeVar("Result")

ReportProgress = Callable[[Progress], None]
Work = Callable[[Job, ReportProgress], Result]
"""Does one job, reports progress as often as it likes, and returns what can be pickled.

It raises a Problem if the job fails.
"""


class _Done(NamedTuple):
    result: Any


@dataclass
class _Worker:
    process: ForkProcess
    connection: Connection
    title: mmap.mmap
    job: int = -1
    """The number of the job that it was given last."""


def in_parallel(
    jobs: Sequence[Job],
    work: Work[Job, Result],
    workers: int,
    verb: str,
    total: int,
    what: str = "images",
) -> list[Result]:
    """Do all jobs and return their results in the order of the jobs.

    Progress is shown meanwhile: `verb` is what happens to the `total` images or other things. The
    first Problem of any job ends them all, and so does an interrupt: each worker gets a SIGTERM, so
    that it can remove what is half done.
    """
    # Workers get a job at a time: shards take unequally long, and a list for each would leave some
    # idle at the end.
    waiting = list(reversed(range(len(jobs))))
    results: list[Any] = [None] * len(jobs)
    crew: list[_Worker] = []
    try:
        # Forked before the meter begins: rich draws its bar in a thread, and a fork would copy the
        # locks that this thread holds.
        for _ in range(min(workers, len(jobs))):
            crew.append(_start(jobs, work))  # noqa: PERF401  an interrupt must find all of them
        with meter(verb, total, what) as shown:
            for worker in crew:
                _send(worker, waiting.pop())
            busy = list(crew)
            while busy:
                ready = wait([worker.connection for worker in busy])
                for worker in [worker for worker in busy if worker.connection in ready]:
                    message = _receive(worker)
                    if isinstance(message, Progress):
                        shown.advance(message)
                        continue
                    results[worker.job] = message.result
                    if waiting:
                        _send(worker, waiting.pop())
                    else:
                        busy.remove(worker)
    finally:
        _end(crew)
    return results


def working_on(item: str) -> None:
    """Note the file or image that this worker begins, so that its death can be put down to it."""
    if _title:
        encoded = item.encode(errors="replace")[: TITLE_BYTES - 1]
        _title[: len(encoded) + 1] = encoded + b"\0"


def _start(jobs: Sequence[Job], work: Work[Job, Result]) -> _Worker:
    # Forked, so that jobs, open archives and their listings are there without being pickled.
    context = multiprocessing.get_context("fork")
    title = mmap.mmap(-1, TITLE_BYTES)
    parent_end, worker_end = context.Pipe()
    args = (worker_end, jobs, work, title, os.getpid())
    process = context.Process(target=_serve, args=args, daemon=True)
    process.start()
    worker_end.close()
    return _Worker(process, parent_end, title)


def _send(worker: _Worker, job: int) -> None:
    worker.job = job
    try:
        worker.connection.send(job)
    except OSError:  # it was killed between two jobs
        raise _dead(worker) from None


def _receive(worker: _Worker) -> Progress | _Done:
    try:
        message: Progress | _Done | Problem = worker.connection.recv()
    except (EOFError, OSError):
        raise _dead(worker) from None
    if isinstance(message, Problem):
        raise message
    return message


def _dead(worker: _Worker) -> Problem:
    worker.process.join()
    exit_code = worker.process.exitcode or 0
    item = one_line(worker.title[:].partition(b"\0")[0].decode(errors="replace"))
    reason, remedy = f"exit code {exit_code}", "run the same command again"
    if exit_code == -signal.SIGKILL:
        reason += ", SIGKILL: out of memory, or killed by hand"
        remedy += "; if it dies again, with a smaller --workers"
    elif exit_code < 0:
        reason += f", {signal.Signals(-exit_code).name}: a crash in a library that reads images"
        remedy += "; if it dies there again, take that image out of the source" if item else ""
    return Problem(f"{item}{': ' if item else ''}a worker process died ({reason}); {remedy}")


def _end(crew: list[_Worker]) -> None:
    for worker in crew:
        worker.process.terminate()
    for worker in crew:
        worker.process.join(GRACE_SECONDS)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.connection.close()
        worker.title.close()


def _serve(
    connection: Connection,
    jobs: Sequence[Job],
    work: Work[Job, Result],
    title: mmap.mmap,
    parent: int,
) -> NoReturn:
    global _title
    _title = title
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us as the parent's SIGTERM
    signal.signal(signal.SIGTERM, _leave)
    reporter = _Reporter(connection)
    while True:
        job = jobs[connection.recv()]
        outcome: _Done | Problem
        try:
            outcome = _Done(work(job, reporter.advance))
        except Problem as problem:
            outcome = problem
        reporter.flush()
        working_on("")  # before the answer: a worker killed between two jobs has none to name
        connection.send(outcome)


class _Reporter:
    """Sums up progress and sends it a few times a second: one for each image would be too many."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._images = self._bytes = 0
        self._reported = time.monotonic()

    def advance(self, progress: Progress) -> None:
        """Count; send the sums if they have not been sent for a while."""
        self._images += progress.images
        self._bytes += progress.bytes
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Send the sums that have not been sent."""
        if self._images:
            self._connection.send(Progress(self._images, self._bytes))
        self._images = self._bytes = 0
        self._reported = time.monotonic()


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
