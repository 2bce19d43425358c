"""The protocol between the launcher and programs on hosts: orders in, replies out.

    order, reply    a length in bytes on a line, then JSON of that length, an object

They come over standard input and leave over standard output, as SSH connects them.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rackrun.launcher.remote.files import explained

MARKER = b"\nrackrun program 1\n"
"""Precedes the first reply: all before it is noise, printed by a login shell."""


def announce() -> None:
    """Mark where the replies begin."""
    sys.stdout.buffer.write(MARKER)
    sys.stdout.buffer.flush()


def answer_orders(
    handlers: Mapping[str, Callable[..., dict[str, Any]]], silent_seconds: int = 0
) -> dict[str, Any]:
    """Reply to orders until one has no handler; return that one, or {} at the end of input.

    `silent_seconds`: get SIGALRM after this long without an order; 0 waits without a limit.
    """
    while True:
        signal.alarm(silent_seconds)
        order = read_order()
        signal.alarm(0)
        if order.get("do") not in handlers:
            return order
        try:
            fields = handlers[order.pop("do")](**order)
        except OSError as error:
            fields = {"error": explained(error)}
        reply(fields)


def read_order() -> dict[str, Any]:
    """Wait for the next order; return an empty one at the end of standard input."""
    length = sys.stdin.buffer.readline()
    return dict(json.loads(sys.stdin.buffer.read(int(length)))) if length else {}


def reply(fields: dict[str, Any]) -> None:
    """Send one reply."""
    text = json.dumps(fields).encode()
    sys.stdout.buffer.write(b"%d\n%s" % (len(text), text))
    sys.stdout.buffer.flush()
