"""Progress of a rank: reports to the launcher, readable lines from rank 0.

A report is one JSON object in one datagram. It is also the rank's sign of life, so it comes from
the loop itself, never from a thread. It never makes a step wait: what nobody takes is dropped.
"""

import json
import os
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from rackrun.units import duration
from training.ranks import Ranks
from training.schedule import Schedule

SECONDS_BETWEEN_REPORTS = 0.2
DATAGRAM = (socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
CLEAR_LINE = "\r\x1b[K"


class ProgressReporter:
    """The voice of a rank: every rank reports, the first one also writes lines."""

    def __init__(self, ranks: Ranks, schedule: Schedule, epochs: int) -> None:
        self._report: dict[str, Any] = {
            "rank": ranks.rank,
            "phase": "start",
            "epochs": epochs,
            "steps": schedule.steps,
        }
        self._epochs = epochs
        self._epoch_steps = schedule.epoch_steps
        self._next = 0.0
        self._speaks = ranks.first
        self._tells_steps = ranks.first and not self.launched
        self._live = self._tells_steps and sys.stdout.isatty()

    @property
    def launched(self) -> bool:
        """Return True when a launcher takes the reports and shows them."""
        return bool(os.environ.get("RACKRUN_REPORTS"))

    def phase(self, name: str, **fields: Any) -> None:
        """Report, at once, that another phase begins."""
        self._report |= {"phase": name, **fields}
        self._send()

    def step(self, step: int) -> None:
        """Report that a step is done, unless the last report was a moment ago."""
        epoch = (step - 1) // self._epoch_steps
        self._report |= {
            "epoch": epoch + 1,
            "step": step,
            "epoch_step": step - epoch * self._epoch_steps,
            "epoch_steps": self._epoch_steps,
        }
        self._send_now_and_then()

    def evaluated(self, batches: int) -> None:
        """Report that so many batches of an evaluation are done."""
        self._report |= {"epoch_step": batches}
        self._send_now_and_then()

    def measured(
        self, loss: float, accuracy: float, images_per_second: float, seconds_left: float
    ) -> None:
        """Take up new numbers, and show them where no launcher does."""
        self._report |= {
            "loss": round(loss, 6),
            "accuracy": round(accuracy, 6),
            "images_per_second": round(images_per_second, 1),
        }
        if self._tells_steps:
            self._show(
                f"epoch {self._report['epoch']}/{self._epochs}"
                f"  step {self._report['epoch_step']}/{self._epoch_steps}"
                f"  loss {loss:.4f}  accuracy {accuracy:.1%}  {images_per_second:,.0f} images/s"
                f"  {duration(seconds_left)} left"
            )

    def judged(self, best: float) -> None:
        """Take up the best validation accuracy so far."""
        self._report |= {"best": round(best, 6)}

    def slow(self, rank: int, why: str, text: str) -> None:
        """Report who holds up the others, if one does, and why; the first rank tells it for all."""
        if self._speaks:
            self._report |= {"slow_rank": rank, "slow_why": why, "slow": text}
            self._send()

    def line(self, text: str) -> None:
        """A line for people; only the first rank writes it."""
        if self._speaks:
            sys.stdout.write(f"{CLEAR_LINE if self._live else ''}{text}\n")
            sys.stdout.flush()

    def _show(self, text: str) -> None:
        """A line that the next one replaces on a terminal."""
        sys.stdout.write(f"{CLEAR_LINE}{text}" if self._live else f"{text}\n")
        sys.stdout.flush()

    def _send_now_and_then(self) -> None:
        if time.monotonic() >= self._next:
            self._send()

    def _send(self) -> None:
        self._next = time.monotonic() + SECONDS_BETWEEN_REPORTS
        report(self._report)


def report(fields: dict[str, Any]) -> None:
    """Tell the launcher something, if there is one; what it does not take at once is dropped."""
    if target := os.environ.get("RACKRUN_REPORTS"):
        with suppress(OSError), socket.socket(*DATAGRAM) as sender:
            sender.sendto(json.dumps(fields).encode(), target)


def report_start() -> None:
    """Tell the launcher that this rank reports: it can be said to hang before others meet it."""
    report({"rank": int(os.environ.get("RANK", 0)), "phase": "start"})
