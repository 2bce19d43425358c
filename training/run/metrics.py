"""Metrics of a run: metrics.jsonl, and the loggers that get its lines.

Counts are summed first and divided last: over batches, over ranks, over an epoch, each image has
the same weight.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rackrun.atomic import translated_os_errors, write_whole
from rackrun.run_folder import RunFolder
from training.config import Config, as_plain
from training.counts import TOP5_CLASSES, Counts, Scaling
from training.monitor.stragglers import Waiting
from training.run.tracker import Tracker
from training.track.scalars import Line
from training.track.sent import hand_on


class Logger(Protocol):
    """Something that shows the numbers of a run."""

    def log(self, line: Line) -> None:
        """Take a line of metrics.jsonl, which has it already."""

    def end(self, verdict: str) -> None:
        """Take up that the run is over: finished, stopped or failed."""


class MetricsWriter:
    """Writes metrics.jsonl, and hands each line to the loggers."""

    def __init__(self, path: Path, loggers: Sequence[Logger]) -> None:
        self.path = path
        self._loggers = loggers

    def train(
        self,
        step: int,
        epoch: float,
        counts: Counts,
        speed: float,
        rate: float,
        scaling: Scaling | None = None,
    ) -> None:
        """Write a line about the steps since the last one."""
        scaled = {"loss_scale": scaling.scale, "skipped_steps": scaling.skipped} if scaling else {}
        self._write(
            kind="train",
            step=step,
            epoch=round(epoch, 4),
            loss=round(counts.mean_loss, 6),
            accuracy=round(counts.accuracy, 6),
            images_per_second=round(speed, 1),
            rate=rate,
            **scaled,
        )

    def start(self, step: int, epoch: float) -> None:
        """Write a line about the begin of a run, or of its next part after a resume."""
        self._write(kind="start", step=step, epoch=round(epoch, 4))

    def evaluate(self, step: int, epoch: float, counts: Counts, classes: int, split: str) -> None:
        """Write a line about an evaluation."""
        self._write(
            kind="evaluate",
            step=step,
            epoch=round(epoch, 4),
            split=split,
            loss=round(counts.mean_loss, 6),
            top1=round(counts.accuracy, 6),
            top5=round(counts.accuracy5, 6) if classes > TOP5_CLASSES else None,
            samples=counts.samples,
        )

    def waits(self, step: int, epoch: float, waiting: Waiting) -> None:
        """Write a line about which rank waited for which, in shares of a step."""
        self._write(
            kind="waits",
            step=step,
            epoch=round(epoch, 4),
            rank=waiting.rank,
            why=waiting.why,
            waited=round(waiting.waited / waiting.step, 4),
            network=round(waiting.network / waiting.step, 4),
            link_rank=waiting.link_rank,
        )

    def end(self, verdict: str) -> None:
        """Report to every logger how the run ended: finished, stopped or failed."""
        for logger in self._loggers:
            logger.end(verdict)

    def _write(self, **values: Any) -> None:
        line = {**values, "time": round(time.time(), 3)}
        with translated_os_errors(self.path), self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        for logger in self._loggers:
            logger.log(line)


def begin_metrics(
    folder: RunFolder,
    config: Config,
    earlier: RunFolder | None,
    step: int,
    say: Callable[[str], None],
) -> MetricsWriter:
    """Begin with the lines of an earlier run up to this step, and start the loggers."""
    kept = _lines_until(step, earlier.metrics) if earlier else []
    write_whole(folder.metrics, "".join(json.dumps(line) + "\n" for line in kept).encode())
    loggers: list[Logger] = []
    if config.tensorboard:
        from training.track.tensorboard import TensorBoard  # a second of imports

        loggers.append(TensorBoard(folder.tensorboard, as_plain(config), kept))
    for name in config.trackers:
        if earlier:
            hand_on(earlier.path, folder.path, name)
        loggers.append(Tracker(name, folder.path, say))
    return MetricsWriter(folder.metrics, loggers)


def _lines_until(step: int, path: Path) -> list[Line]:
    """Return the whole lines of a file up to a step."""
    text = path.read_text() if path.exists() else ""
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in map(json.loads, whole) if line["step"] <= step]
