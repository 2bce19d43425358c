"""What starts a run, and the controller that outlives it.

    starter, on its terminal                controller, in a session of its own
    Ctrl-C, TERM              ── stop ──▶   as if it had got that signal itself
    the terminal hangs up     ── leave ──▶  the run goes on, and nothing is printed any more
    killed              ── end of pipe ──▶  ranks save, and the run stops

Without a terminal, as process 1 and in a step of Slurm there is no controller: the launcher stays
in its caller's tree of processes, and ends with it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType

from rackrun.launcher.output.console import say
from rackrun.launcher.output.nonblocking import nobody_reads
from rackrun.signals import handle, restore

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP, signal.SIGUSR1, signal.SIGUSR2)
LEAVE = b"leave\n"


def may_leave(environment: Mapping[str, str]) -> bool:
    """Return True where a run may outlive what started it: a person's terminal."""
    if os.getpid() == 1 or "SLURM_STEP_ID" in environment:
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def controlled(work: Callable[[], int]) -> int:
    """Do `work` in a controller, and return its exit code; 129 once the terminal has hung up.

    A fork has the options, variables and secrets already. It must come before any thread.
    """
    orders, starter = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    controller = os.fork()
    if controller == 0:
        os.close(starter)
        _become_controller(orders)
        return work()
    os.close(orders)
    try:
        return _wait_for(controller, starter)
    finally:
        os.close(starter)


# -- the starter


class _HungUp(BaseException):
    """The terminal is gone."""


def _wait_for(controller: int, orders: int) -> int:
    def pass_on(number: int, frame: FrameType | None) -> None:
        _send(orders, f"{number}\n".encode())

    def leave(number: int, frame: FrameType | None) -> None:
        _send(orders, LEAVE)
        raise _HungUp

    before = {**handle(PASSED_ON, pass_on), **handle((signal.SIGHUP,), leave)}
    try:
        _, status = os.waitpid(controller, 0)
    except _HungUp:
        return 128 + signal.SIGHUP
    finally:
        restore(before)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        say("the controller of the run was killed; hosts end the run on their own")
        return 128 - code
    return code


def _send(orders: int, order: bytes) -> None:
    with suppress(BrokenPipeError):  # it has just ended
        os.write(orders, order)


# -- the controller


def _become_controller(orders: int) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    main = threading.main_thread().ident
    assert main is not None
    threading.Thread(target=_obey, args=(orders, main), daemon=True).start()


def _obey(orders: int, main: int) -> None:
    with open(orders, "rb", buffering=0) as lines:
        while line := lines.readline():
            if line == LEAVE:
                nobody_reads()
                return
            signal.pthread_kill(main, int(line))
    signal.pthread_kill(main, signal.SIGHUP)
