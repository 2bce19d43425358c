"""Metrics of a run: metrics.jsonl, and the loggers that get its lines: TensorBoard, and trackers.

Counts are summed first and divided last: over batches, over ranks, over an epoch, each image has
the same weight.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rackrun.atomic import translated_os_errors, write_whole
from rackrun.run_folder import RunFolder
from rackrun.training.config import Config
from rackrun.training.counts import TOP5_CLASSES, Counts, Scaling
from rackrun.training.monitor.stragglers import Waiting
from rackrun.training.track.lines import Line, scalars, summary
from rackrun.training.track.tracker import Tracker, hand_on


class MetricsWriter:
    """Writes the lines of metrics.jsonl, and hands them to loggers."""

    def __init__(
        self,
        path: Path,
        lines: Sequence[str],
        config: Config,
        settings: dict[str, Any],
        earlier: Path | None,
        say: Callable[[str], None],
    ) -> None:
        """Write the lines so far, and start the loggers.

        `settings` are those of config.json; `earlier` is the folder of the run that goes on.
        """
        self.path = path
        self._loggers: list[TensorBoard | Tracker] = []
        write_whole(self.path, "".join(f"{line}\n" for line in lines).encode())
        folder = RunFolder(self.path.parent)
        kept = [json.loads(line) for line in lines]
        if config.tensorboard:
            self._loggers.append(TensorBoard(folder.tensorboard, asdict(config), kept))
        for name in config.trackers:
            if earlier:
                hand_on(earlier, folder.path, name)
            self._loggers.append(Tracker(name, folder.path, settings, kept, say))

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
            "train",
            step,
            epoch,
            loss=round(counts.mean_loss, 6),
            accuracy=round(counts.accuracy, 6),
            images_per_second=round(speed, 1),
            rate=rate,
            **scaled,
        )

    def start(self, step: int, epoch: float) -> None:
        """Write a line about the start of a run, or of its next part after a resume."""
        self._write("start", step, epoch)

    def evaluate(self, step: int, epoch: float, counts: Counts, classes: int, split: str) -> None:
        """Write a line about an evaluation."""
        self._write(
            "evaluate",
            step,
            epoch,
            split=split,
            loss=round(counts.mean_loss, 6),
            top1=round(counts.accuracy, 6),
            top5=round(counts.accuracy5, 6) if classes > TOP5_CLASSES else None,
            samples=counts.samples,
        )

    def waits(self, step: int, epoch: float, waiting: Waiting) -> None:
        """Write a line about which rank waited for which, in shares of a step."""
        self._write(
            "waits",
            step,
            epoch,
            rank=waiting.rank,
            why=waiting.why,
            waited=round(waiting.waited / waiting.step, 4),
            network=round(waiting.network / waiting.step, 4),
        )

    def shares(self, step: int, epoch: float, images: dict[int, int]) -> None:
        """Write a line about how many images of a full step each rank gets after a step."""
        self._write("shares", step, epoch, images=images)

    def end(self, verdict: str) -> None:
        """Report to every logger how the run ended: finished, stopped or failed."""
        for logger in self._loggers:
            logger.end(verdict)

    def _write(self, kind: str, step: int, epoch: float, **values: Any) -> None:
        line = {"kind": kind, "step": step, "epoch": round(epoch, 4), **values}
        line["time"] = round(time.time(), 3)
        with translated_os_errors(self.path), self.path.open("a") as file:
            file.write(f"{json.dumps(line, allow_nan=False)}\n")
        for logger in self._loggers:
            logger.log(line)


def lines_until(step: int, path: Path) -> list[str]:
    """Return the whole lines of a file up to a step."""
    text = path.read_text() if path.exists() else ""
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line.rstrip("\n") for line in whole if json.loads(line)["step"] <= step]


class TensorBoard:
    """Writes the event files of a run."""

    def __init__(self, folder: Path, settings: dict[str, Any], earlier: list[Line]) -> None:
        """Begin with the lines of an earlier run, in place of what there is of them already."""
        from torch.utils.tensorboard import SummaryWriter  # a second of imports

        self._run = folder.parent
        self._settings = settings
        self._evaluations: list[Line] = []
        self._events = SummaryWriter(str(folder), purge_step=0 if earlier else None)
        for line in earlier:
            self.log(line)

    def log(self, line: Line) -> None:
        """Add a point to each curve."""
        for name, value in scalars(line).items():
            self._events.add_scalar(name, value, line["step"], walltime=line.get("time"))
        if line["kind"] == "evaluate":
            self._evaluations.append(line)

    def end(self, verdict: str) -> None:
        """Add settings and images, and bring everything to the files."""
        from torch.utils.tensorboard.summary import hparams

        from rackrun.run_report.folder import read_predictions

        result = {f"hparam/{name}": value for name, value in summary(self._evaluations, {}).items()}
        assert self._events.file_writer
        for part in hparams(self._settings, result):
            self._events.file_writer.add_summary(part)
        for name, value in result.items():
            self._events.add_scalar(name, value)
        if verdict == "finished" and (
            predictions := read_predictions(RunFolder(self._run).predictions)
        ):
            self._events.add_images("predictions", predictions.images, dataformats="NHWC")
        self._events.close()
