"""Progress of a rank: how fast it trains, reports to the launcher, readable lines from rank 0."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from rackrun.contract import phases, variables
from rackrun.reports import Reporter, rank_number, send
from rackrun.training.counts import Counts, Scaling
from rackrun.training.ranks import Ranks
from rackrun.training.schedule import Schedule
from rackrun.units import duration

CLEAR_LINE = "\r\x1b[K"


class ProgressReporter:
    """Progress of a rank: every rank sends reports, rank 0 also prints lines."""

    def __init__(self, ranks: Ranks, schedule: Schedule, epochs: int) -> None:
        self._reporter = Reporter(rank_number(), epochs=epochs, steps=schedule.steps)
        self._report = self._reporter.fields
        self._epochs = epochs
        self._epoch_steps = schedule.epoch_steps
        self._prints = ranks.first
        self._prints_steps = ranks.first and not self.launched
        self._live = self._prints_steps and sys.stdout.isatty()

    @property
    def launched(self) -> bool:
        """Return True if a launcher takes the reports and shows them."""
        return bool(os.environ.get(variables.REPORTS))

    @property
    def current_phase(self) -> str:
        """Return the phase that was reported last."""
        return str(self._report["phase"])

    def phase(self, name: str, **fields: Any) -> None:
        """Report, at once, that another phase begins."""
        self._report |= {"phase": name, **fields}
        self._reporter.send()

    def step(self, step: int) -> None:
        """Report that a step is done, unless the last report was a moment ago."""
        epoch = (step - 1) // self._epoch_steps
        self._report_within_phase(
            epoch=epoch + 1,
            step=step,
            epoch_step=step - epoch * self._epoch_steps,
            epoch_steps=self._epoch_steps,
        )

    def evaluated(self, batches: int) -> None:
        """Report the number of batches of an evaluation that are done."""
        self._report_within_phase(epoch_step=batches)

    def prefetched(self, megabytes: int, text: str) -> None:
        """Report what this rank has fetched; show what all have, if no launcher does."""
        self._report_within_phase(epoch_step=megabytes)
        if self._prints_steps:
            self._show(text)

    def measured(
        self, loss: float, accuracy: float | None, images_per_second: float, seconds_left: float
    ) -> None:
        """Report new numbers, and print them if no launcher does; --synthetic has no accuracy."""
        self._report |= {
            "loss": round(loss, 6),
            **({} if accuracy is None else {"accuracy": round(accuracy, 6)}),
            "images_per_second": round(images_per_second, 1),
        }
        if self._prints_steps:
            self._show(
                f"epoch {self._report['epoch']}/{self._epochs}"
                f"  step {self._report['epoch_step']}/{self._epoch_steps}"
                f"  loss {loss:.4f}{'' if accuracy is None else f'  accuracy {accuracy:.1%}'}"
                f"  {images_per_second:,.0f} images/s"
                f"  {duration(seconds_left)} left"
            )

    def reads(self, dataset: str) -> None:
        """Report a description of the data; once, for all ranks."""
        if self._prints:
            self._report |= {"dataset": dataset}

    def best_accuracy(self, best: float) -> None:
        """Report the best validation accuracy so far."""
        self._report |= {"best": round(best, 6)}

    def slow(self, rank: int, why: str, text: str) -> None:
        """Report which rank delays the others, if any, and why; once, for all ranks."""
        if self._prints:
            self._report |= {"slow_rank": rank, "slow_why": why, "slow": text}
            self._reporter.send()

    def share(self, share: float) -> None:
        """Report which share of the images of a step this rank computes."""
        self._report |= {"share": round(share, 6)}

    def line(self, text: str) -> None:
        """Print a line for people, on rank 0 only."""
        if self._prints:
            sys.stdout.write(f"{CLEAR_LINE if self._live else ''}{text}\n")
            sys.stdout.flush()

    def _show(self, text: str) -> None:
        # On a terminal, the next line replaces it.
        sys.stdout.write(f"{CLEAR_LINE}{text}" if self._live else f"{text}\n")
        sys.stdout.flush()

    def _report_within_phase(self, **fields: Any) -> None:  # at a limited rate
        self._reporter.report(self._report["phase"], fields)


class Epoch(NamedTuple):
    """What an epoch's steps have added up to, over all ranks."""

    counts: Counts = Counts()
    seconds: float = 0.0
    skipped_steps: int = 0
    """As gradients overflowed float16."""

    @property
    def images_per_second(self) -> float:
        """Return the speed of all ranks."""
        return self.counts.samples / max(self.seconds, 1e-9)


class Pace:
    """The clock of training, which stands still while a run evaluates or saves."""

    def __init__(self) -> None:
        self.begun = 0
        """The step at which the run began or was resumed."""
        self.images = 0
        """Since then, of all ranks."""
        self.seconds = 0.0
        """That they took."""
        self._epoch = Epoch()
        self._clock = time.monotonic()

    def start(self) -> None:
        """Start the clock: training begins or continues."""
        self._clock = time.monotonic()

    def advance(self, counts: Counts, scaling: Scaling | None) -> float:
        """Add the steps since the last call or start; return their images per second."""
        seconds = time.monotonic() - self._clock
        self._clock += seconds
        self.seconds += seconds
        self.images += counts.samples
        epoch = self._epoch
        self._epoch = Epoch(
            epoch.counts.plus(counts),
            epoch.seconds + seconds,
            epoch.skipped_steps + (scaling.skipped if scaling else 0),
        )
        return counts.samples / seconds

    def seconds_left(self, step: int, steps: int) -> float:
        """Return how long the steps after this one will take, as those since the begin did."""
        return (steps - step) * self.seconds / max(step - self.begun, 1)

    def end_epoch(self) -> Epoch:
        """Return the sums of the epoch, and begin to count the next one."""
        epoch, self._epoch = self._epoch, Epoch()
        return epoch

    @property
    def images_per_second(self) -> float:
        """Return the speed of all ranks since the begin."""
        return self.images / max(self.seconds, 1e-9)


def report_start() -> None:
    """Report that this rank has started: from now on hangs are detected, even before ranks join."""
    send({"rank": rank_number(), "phase": phases.START})


@contextmanager
def compilation_reported(progress: ProgressReporter, compiles: bool) -> Iterator[None]:
    """Report the phase "compile" while torch compiles, and afterwards the previous phase again.

    With --compile a step may take minutes. The first one compiles for batches of any size, and so
    do the first one with larger images and the first batch of an evaluation. (Batches of one image
    or none are exceptions: torch compiles for them separately.)
    """
    if not compiles:
        yield
        return
    from torch._dynamo.callback import callback_handler  # takes a second, only with --compile

    interrupted = []

    def begin(_: Any) -> None:
        interrupted.append(progress.current_phase)
        progress.phase(phases.COMPILE)

    def end(_: Any) -> None:
        progress.phase(interrupted.pop())

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)
