"""Jobs done side by side by forked processes, which never outlive the one that started them."""

import mmap
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, NoReturn, TypeVar

from rackrun.errors import Problem
from rackrun.signals import end_with
from rackrun.terminal import one_line

GRACE_SECONDS = 5.0
TITLE_BYTES = 1024

# A worker killed by SIGKILL sends no message any more: what it works on has to stand in memory
# that its parent can read already.
_title: mmap.mmap | None = None

Job = TypeVar("Job")


Message = TypeVar("Message")

Work = Callable[[Job, Callable[[Message], None]], None]
"""Does one job and sends messages about its progress; raises a Problem if that fails."""


@dataclass
class _Worker:
    process: ForkProcess
    connection: Connection
    title: mmap.mmap


def in_parallel(
    jobs: Sequence[Job], work: Work[Job, Message], workers: int
) -> Generator[Message, None, None]:
    """Do all jobs and yield their messages; the first Problem of any ends them all.

    Leaving the loop early, by an interrupt for instance, ends the workers too: each gets a
    SIGTERM, so that it can remove what is half done.
    """
    # Workers get a job at a time: shards take unequally long, and a list for each would leave some
    # idle at the end.
    waiting = list(reversed(jobs))
    crew = [_start(work) for _ in range(min(workers, len(jobs)))]
    try:
        for worker in crew:
            _send(worker, waiting.pop())
        busy = list(crew)
        while busy:
            ready = wait([worker.connection for worker in busy])
            for worker in [worker for worker in busy if worker.connection in ready]:
                message = _receive(worker)
                if message is not None:
                    yield message
                elif waiting:
                    _send(worker, waiting.pop())
                else:
                    busy.remove(worker)
    finally:
        _end(crew)


def working_on(item: str) -> None:
    """Note the file or image that this worker begins, so that its death can be put down to it."""
    if _title:
        encoded = item.encode(errors="replace")[: TITLE_BYTES - 1]
        _title[: len(encoded) + 1] = encoded + b"\0"


def _start(work: Work[Job, Message]) -> _Worker:
    # Forked, so that open archives and their listings are there without being pickled.
    context = multiprocessing.get_context("fork")
    title = mmap.mmap(-1, TITLE_BYTES)
    parent_end, worker_end = context.Pipe()
    args = (worker_end, work, title, os.getpid())
    process = context.Process(target=_serve, args=args, daemon=True)
    process.start()
    worker_end.close()
    return _Worker(process, parent_end, title)


def _send(worker: _Worker, job: object) -> None:
    try:
        worker.connection.send(job)
    except OSError:  # it was killed between two jobs
        raise _dead(worker) from None


def _receive(worker: _Worker) -> Any:
    """Return a message of a job, or None at its end; raise the Problem that it raised."""
    try:
        message = worker.connection.recv()
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
    connection: Connection, work: Work[Job, Message], title: mmap.mmap, parent: int
) -> NoReturn:
    """Run jobs one by one, until the parent ends this process."""
    global _title
    _title = title
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us as the parent's SIGTERM
    signal.signal(signal.SIGTERM, _leave)
    while True:
        job = connection.recv()
        try:
            work(job, connection.send)
        except Problem as problem:
            connection.send(problem)
        working_on("")
        connection.send(None)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
