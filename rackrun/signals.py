"""Handle signals, except those that the caller ignores; end with the parent process."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

PR_SET_PDEATHSIG = 1

Handler = Callable[[int, FrameType | None], object]

PASSED_ON_INT = signal.SIGURG
"""Ctrl-C, for the controller of a run: INT itself may come from whoever signals whole groups."""


def ignore(number: int, frame: FrameType | None) -> None:
    """Ignore a signal here, but not in the programs that are started, unlike SIG_IGN."""


def is_ignored(number: signal.Signals) -> bool:
    """Return True for a signal that this process or its caller ignores."""
    return signal.getsignal(number) in (signal.SIG_IGN, ignore)


def handle(numbers: Iterable[signal.Signals], handler: Handler) -> dict[signal.Signals, Any]:
    """Set the handler of signals, except those that the caller ignores; return the previous ones.

    `nohup` and `&` in a script make their programs ignore SIGHUP and SIGINT.
    """
    ours = [number for number in numbers if not is_ignored(number)]
    return {number: signal.signal(number, handler) for number in ours}


def restore(before: dict[signal.Signals, Any]) -> None:
    """Undo `handle`."""
    for number, handler in before.items():
        signal.signal(number, handler)


@contextmanager
def ended_by_a_signal(*numbers: signal.Signals) -> Iterator[None]:
    """Let the first of these signals end an optional wait by KeyboardInterrupt, and no other.

    By default, Ctrl-C, TERM and HUP do. In a thread of a user's program, signals are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if not received:
            received.append(number)
            raise KeyboardInterrupt

    before = handle(numbers or (signal.SIGINT, PASSED_ON_INT, signal.SIGTERM, signal.SIGHUP), end)
    try:
        yield
    finally:
        restore(before)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let TERM and HUP end a display as Ctrl-C does, with exit codes of their own."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(128 + number)

    before = handle((signal.SIGTERM, signal.SIGHUP), end)
    try:
        yield
    finally:
        restore(before)


def has_ended(child: subprocess.Popen[bytes]) -> bool:
    """Return True once a child has ended; `wait` returns at once then.

    A signal that raises within Popen.poll() can leave its lock taken, and Popen.wait() would wait
    for it forever: the kernel is asked instead.
    """
    if child.returncode is not None:
        return True
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
