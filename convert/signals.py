"""Handle Ctrl-C and SIGTERM while a command imports: there is nothing to clean up yet."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from rackrun.signals import handle, restore

MESSAGES = {signal.SIGINT: b"interrupted\n", signal.SIGTERM: b""}


@contextlib.contextmanager
def while_importing() -> Iterator[None]:
    """Let either signal end the process at once, with its exit code and no traceback.

    Raising an exception would not do: the import system swallows it in places. A signal that is
    ignored, as under nohup, stays so.
    """
    before = handle(MESSAGES, _leave)
    try:
        yield
    finally:
        restore(before)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, MESSAGES[signal.Signals(number)])
    os._exit(128 + number)
