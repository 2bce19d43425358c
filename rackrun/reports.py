"""Reports of a rank to the launcher: one JSON object in one datagram. Standard library only.

A report also shows that the rank makes progress, so the loop itself sends it, never a thread. It
never delays a step: a report that is not taken at once is dropped, and the next one repeats it.
"""

import atexit
import json
import os
import socket
import time
from contextlib import suppress
from functools import cache
from typing import Any

from rackrun.contract import phases, variables

SECONDS_BETWEEN_REPORTS = 0.2


def report(phase: str = phases.TRAIN, **fields: Any) -> None:
    """Report how far this rank is: `report(step=120, loss=0.43)`.

    Do nothing without a launcher, and never raise. Fields and phases are those of
    docs/guides/own-script.md; numbers may be scalars of NumPy or PyTorch. Steps are sent five times
    a second at most, a change of phase at once, and what is then left when the script ends.
    """
    if os.environ.get(variables.REPORTS):
        with suppress(Exception):  # whatever a script passes, its training goes on
            # A tensor without the graph that led to it, which would fill the memory.
            values = {
                name: value.detach() if hasattr(value, "detach") else value
                for name, value in fields.items()
            }
            _script_reporter().report(phase, values)


class Reporter:
    """All that a rank has reported so far, which each of its reports repeats."""

    def __init__(self, rank: int, phase: str = phases.START, **fields: Any) -> None:
        self.fields: dict[str, Any] = {"rank": rank, "phase": phase, **fields}
        self._next = 0.0
        self._unsent = False

    def report(self, phase: str, fields: dict[str, Any]) -> None:
        """Take new values; send them at once in another phase, otherwise every few moments."""
        changed = phase != self.fields["phase"]
        self.fields |= {**fields, "phase": phase}
        self._unsent = True
        if changed or time.monotonic() >= self._next:
            self.send()

    def send_rest(self) -> None:
        """Send what was reported since the last datagram, if anything was."""
        if self._unsent:
            with suppress(Exception):
                self.send()

    def send(self) -> None:
        """Send everything now."""
        self._next = time.monotonic() + SECONDS_BETWEEN_REPORTS
        self._unsent = False
        send(self.fields)


def send(fields: dict[str, Any]) -> None:
    """Send a report if there is a launcher; what it does not take at once is dropped."""
    if target := os.environ.get(variables.REPORTS):
        data = json.dumps(fields, default=_number).encode()
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(data, target)


def rank_number() -> int:
    """Return the number of this rank."""
    return int(os.environ.get("RANK", "0"))


@cache
def _script_reporter() -> Reporter:
    reporter = Reporter(rank_number())
    atexit.register(reporter.send_rest)  # its last values, which came too soon after others
    return reporter


def _number(value: Any) -> object:
    """Return the number in a scalar of NumPy or PyTorch, or None where there is none."""
    with suppress(Exception):
        return value.item()
    return None
