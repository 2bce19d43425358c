"""Jobs done side by side by forked processes, which never outlive the one that started them."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, NoReturn, TypeVar

from rackrun.errors import Problem

PR_SET_PDEATHSIG = 1
GRACE_SECONDS = 5.0

Job = TypeVar("Job")


Message = TypeVar("Message")

Work = Callable[[Job, Callable[[Message], None]], None]
"""Does one job and sends messages about its progress; raises a Problem if that fails."""


@dataclass
class _Worker:
    process: ForkProcess
    connection: Connection


def in_parallel(
    jobs: Sequence[Job], work: Work[Job, Message], workers: int
) -> Generator[Message, None, None]:
    """Do all jobs and yield their messages; the first Problem of any ends them all.

    Leaving the loop early, by an interrupt for instance, ends the workers too: each gets a
    SIGTERM, so that it can remove what is half done.
    """
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


def _start(work: Work[Job, Message]) -> _Worker:
    context = multiprocessing.get_context("fork")
    own, other = context.Pipe()
    process = context.Process(target=_serve, args=(other, work, os.getpid()), daemon=True)
    process.start()
    other.close()
    return _Worker(process, own)


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
    return Problem(
        f"a worker process died (exit code {worker.process.exitcode}; -9 is a lack of memory "
        "or a kill by hand); run the same command again to go on"
    )


def _end(crew: list[_Worker]) -> None:
    for worker in crew:
        worker.process.terminate()
    for worker in crew:
        worker.process.join(GRACE_SECONDS)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.connection.close()


def _serve(connection: Connection, work: Work[Job, Message], parent: int) -> NoReturn:
    """Run jobs one by one, until the parent ends this process."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us as the parent's SIGTERM
    signal.signal(signal.SIGTERM, _leave)
    while True:
        job = connection.recv()
        try:
            work(job, connection.send)
        except Problem as problem:
            connection.send(problem)
        connection.send(None)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
