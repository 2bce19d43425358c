"""Handle signals, except those that the caller ignores."""

import signal
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

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
