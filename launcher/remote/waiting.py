"""Other programs and slow disks, waited for with a time limit.

subprocess and threading are not imported: each costs a host half as much as starting Python.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

PROGRAM_SECONDS = 30.0
READ_BYTES = 1 << 16


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """Return what some work returns; raise TimeoutError when that takes too long.

    A thread does it: a signal interrupts neither a dead file server nor a slow name server.
    """
    import _thread  # not threading, see above

    outcome: list[Any] = []
    running = _thread.allocate_lock()
    running.acquire()

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))
        finally:
            running.release()

    _thread.start_new_thread(run, ())
    if not running.acquire(timeout=seconds):
        raise TimeoutError(errno.ETIMEDOUT, "takes too long")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def find_program(name: str) -> str | None:
    """Return the path of a program, by PATH."""
    paths = [os.path.join(folder, name) for folder in os.get_exec_path()]
    return next((path for path in paths if os.access(path, os.X_OK)), None)


def lines_of(*argv: str) -> list[str]:
    """Return the lines that a program prints, without the empty ones."""
    output, _ = output_of(list(argv), PROGRAM_SECONDS)
    return [line for line in output.decode(errors="replace").splitlines() if line]


def output_of(command: list[str], seconds: float) -> tuple[bytes, bytes]:
    """Return a program's output and errors; raise TimeoutError when it does not end in time."""
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, out_end, 1),
        (os.POSIX_SPAWN_DUP2, err_end, 2),
    ]
    with open(out, "rb", 0), open(err, "rb", 0):
        try:
            pid = os.posix_spawnp(
                command[0],
                command,
                os.environ,
                file_actions=actions,
                setsigdef=[signal.SIGPIPE],
            )
        finally:
            os.close(out_end)
            os.close(err_end)
        try:
            received = read_all((out, err), time.monotonic() + seconds)
        finally:
            os.kill(pid, signal.SIGKILL)  # it has ended its output, or its time is up
            os.waitpid(pid, 0)
    return received[out], received[err]


def read_all(pipes: tuple[int, ...], deadline: float) -> dict[int, bytes]:
    """Return all output of pipes; raise TimeoutError when they do not end in time."""
    received = dict.fromkeys(pipes, b"")
    left = list(pipes)
    while left:
        ready, _, _ = select.select(left, [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(errno.ETIMEDOUT, "takes too long")
        for pipe in ready:
            data = os.read(pipe, READ_BYTES)
            received[pipe] += data
            if not data:
                left.remove(pipe)
    return received
