"""Metrics of a run: metrics.jsonl and TensorBoard.

Counts are summed first and divided last: over batches, over ranks, over an epoch, each picture has
the same weight.
"""

import json
import time
from pathlib import Path
from typing import Any

from rackrun.atomic import translated_os_errors, write_whole
from training.counts import TOP5_CLASSES, Counts
from training.monitor.stragglers import Waiting
from training.run.folder import RunFiles


class MetricsWriter:
    """Writes a run's numbers into its folder."""

    def __init__(self, folder: RunFiles, tensorboard: bool) -> None:
        self.path = folder.metrics
        self._events = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder.tensorboard))

    def go_on_from(self, earlier: Path, step: int) -> None:
        """Begin with the lines of an earlier run up to this step."""
        text = earlier.read_text() if earlier.exists() else ""
        whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        kept = [line for line in whole if json.loads(line)["step"] <= step]
        write_whole(self.path, "".join(kept).encode())

    def train(self, step: int, epoch: float, counts: Counts, speed: float, rate: float) -> None:
        """A line about the steps since the last one."""
        self._write(
            kind="train",
            step=step,
            epoch=round(epoch, 4),
            loss=round(counts.mean_loss, 6),
            accuracy=round(counts.accuracy, 6),
            images_per_second=round(speed, 1),
            rate=rate,
        )

    def evaluate(self, step: int, epoch: float, counts: Counts, classes: int, split: str) -> None:
        """A line about an evaluation."""
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
        """A line about who waited for whom, in shares of a step."""
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

    def close(self) -> None:
        """Bring everything to the files."""
        if self._events:
            self._events.close()

    def _write(self, **line: Any) -> None:
        with translated_os_errors(self.path), self.path.open("a") as file:
            file.write(json.dumps({**line, "time": round(time.time(), 3)}) + "\n")
        if self._events:
            for name in line.keys() - {
                *("kind", "step", "epoch", "split", "samples", "rank", "why", "link_rank")
            }:
                if line[name] is not None:
                    self._events.add_scalar(f"{line['kind']}/{name}", line[name], line["step"])
