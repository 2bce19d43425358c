"""Signals and standard streams as the caller left them: closed ones, and ignored ones."""

import os
import signal
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], object]


def handle(numbers: Iterable[signal.Signals], handler: Handler) -> dict[signal.Signals, Any]:
    """Have signals call a handler, except those that the caller ignores; return what did before.

    `nohup` and `&` in a script make their programs ignore SIGHUP and SIGINT.
    """
    ours = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in ours}


def restore(before: dict[signal.Signals, Any]) -> None:
    """Undo `handle`."""
    for number, handler in before.items():
        signal.signal(number, handler)


def open_streams() -> None:
    """Open /dev/null where the caller has closed a standard stream, before another file is it."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115, PTH123
