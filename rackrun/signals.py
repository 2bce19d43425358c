"""Handle signals, except those that the caller ignores; end with the parent process."""

import os
import signal
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

PR_SET_PDEATHSIG = 1

Handler = Callable[[int, FrameType | None], object]


def handle(numbers: Iterable[signal.Signals], handler: Handler) -> dict[signal.Signals, Any]:
    """Set the handler of signals, except those that the caller ignores; return the previous ones.

    `nohup` and `&` in a script make their programs ignore SIGHUP and SIGINT.
    """
    ours = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in ours}


def restore(before: dict[signal.Signals, Any]) -> None:
    """Undo `handle`."""
    for number, handler in before.items():
        signal.signal(number, handler)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even by SIGKILL."""
    import ctypes  # as slow to import as a tenth of what a command may take

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
