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
        """Note how the run has ended: finished, stopped or failed."""


class MetricsWriter:
    """Keeps the lines of metrics.jsonl; where it is opened, writes them and hands them to loggers.

    In an elastic run every rank keeps them, as any may become the one that writes.
    """

    def __init__(self, path: Path, lines: Sequence[str] = ()) -> None:
        self.path = path
        self.lines = list(lines)
        self._loggers: list[Logger] = []
        self._is_open = False

    def open(self, config: Config, earlier: Path | None, say: Callable[[str], None]) -> None:
        """Write the lines so far, and start the loggers; `earlier`: the run that goes on."""
        if self._is_open:
            return
        self._is_open = True
        write_whole(self.path, "".join(f"{line}\n" for line in self.lines).encode())
        folder = RunFolder(self.path.parent)
        if config.tensorboard:
            from training.track.tensorboard import TensorBoard  # a second of imports

            kept = [json.loads(line) for line in self.lines]
            self._loggers.append(TensorBoard(folder.tensorboard, as_plain(config), kept))
        for name in config.trackers:
            if earlier:
                hand_on(earlier, folder.path, name)
            self._loggers.append(Tracker(name, folder.path, say))

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

    def shares(self, step: int, epoch: float, images: dict[int, int]) -> None:
        """Write a line about how many images of a full step each rank gets after a step."""
        self._write(kind="shares", step=step, epoch=round(epoch, 4), images=images)

    def end(self, verdict: str) -> None:
        """Report to every logger how the run ended: finished, stopped or failed."""
        for logger in self._loggers:
            logger.end(verdict)

    def _write(self, **values: Any) -> None:
        line = {**values, "time": round(time.time(), 3)}
        self.lines.append(json.dumps(line))
        if self._is_open:
            with translated_os_errors(self.path), self.path.open("a") as file:
                file.write(f"{self.lines[-1]}\n")
        for logger in self._loggers:
            logger.log(line)


def lines_until(step: int, path: Path) -> list[str]:
    """Return the whole lines of a file up to a step."""
    text = path.read_text() if path.exists() else ""
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line.rstrip("\n") for line in whole if json.loads(line)["step"] <= step]
