"""Metrics of a run: metrics.jsonl, and the loggers that get its lines: TensorBoard, and trackers.

Counts are summed first and divided last: over batches, over ranks, over an epoch, each image has
the same weight.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rackrun.atomic import translated_os_errors, write_whole
from rackrun.errors import MissingPackage
from rackrun.run_folder import RunFolder
from rackrun.terminal import one_line
from rackrun.training.config import Config
from rackrun.training.counts import TOP5_CLASSES, Counts, Scaling
from rackrun.training.monitor.stragglers import Waiting
from rackrun.training.stop_requests import StopRequests
from rackrun.training.track.lines import END_SECONDS, Line, hand_on, scalars, summary

STOPPED_SECONDS = 5  # for the tracker of a run that is to end


class MetricsWriter:
    """Writes the lines of metrics.jsonl, and hands them to loggers."""

    def __init__(
        self,
        path: Path,
        lines: Sequence[str],
        config: Config,
        earlier: Path | None,
        say: Callable[[str], None],
    ) -> None:
        """Write the lines so far, and start the loggers; `earlier`: the run that goes on."""
        self.path = path
        self._loggers: list[TensorBoard | Tracker] = []
        write_whole(self.path, "".join(f"{line}\n" for line in lines).encode())
        folder = RunFolder(self.path.parent)
        if config.tensorboard:
            kept = [json.loads(line) for line in lines]
            self._loggers.append(TensorBoard(folder.tensorboard, asdict(config), kept))
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


class Tracker:
    """Starts `python -m rackrun.training track`, and reports in one line when it fails."""

    def __init__(self, name: str, folder: Path, say: Callable[[str], None]) -> None:
        self._name = name
        self._folder = folder
        self._log = folder / f"tracker-{name}.log"
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = self._started()
        except OSError as error:
            self._warn(str(error.strerror))

    def _started(self) -> "subprocess.Popen[bytes]":
        command = ["-m", "rackrun.training", "track", self._name, str(self._folder)]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is for the ranks; this ends as the rank does
            )

    def log(self, line: Line) -> None:
        """Look whether the process still lives; it reads the line from the file."""
        if self._process and self._process.poll() is not None:
            self._warn(self._last_words())

    def end(self, verdict: str) -> None:
        """Pass on how the run ended, and wait until all was sent, for a bounded time."""
        if not (process := self._process):
            return
        assert process.stdin
        with suppress(OSError):
            process.stdin.write(verdict.encode())
        with suppress(OSError):
            process.stdin.close()
        seconds = END_SECONDS if verdict == "finished" else STOPPED_SECONDS
        deadline = time.monotonic() + seconds
        with StopRequests(save_minutes=0) as requests:
            while process.poll() is None and time.monotonic() < deadline and not requests.ending:
                time.sleep(0.02)
        if process.poll() is None:
            process.kill()
            process.wait()
            self._warn("did not end in time")
        elif process.returncode:
            self._warn(self._last_words())

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() or ["no reason given"]
        return one_line(lines[-1]).removeprefix("error: ")[:300]

    def _warn(self, why: str) -> None:
        # Once: the tracker is given up with it.
        if self._process and self._process.stdin:
            with suppress(OSError):
                self._process.stdin.close()
        self._process = None
        rest = f"what it has not got is in {RunFolder(self._folder).metrics}"
        self._say(f"--track {self._name}: {why}; {rest}")


def check_trackers(names: list[str]) -> None:
    """Raise MissingPackage for a tracker that is not installed here."""
    for name in names:
        if find_spec(name) is None:
            raise MissingPackage(name, name)
