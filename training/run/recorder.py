"""The record of a run: its folder, its metrics, the lines it prints, and its results."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rackrun.atomic import atomic_write, translated_os_errors, write_whole
from rackrun.contract import phases, variables
from rackrun.run_folder import RunFolder
from rackrun.terminal import one_line
from rackrun.training import checkpoint
from rackrun.training.checkpoint import Content
from rackrun.training.config import Config
from rackrun.training.counts import TOP5_CLASSES, Counter, Counts, Scaling
from rackrun.training.data.open import Data
from rackrun.training.divergence import check_finite
from rackrun.training.monitor.stragglers import Waiting
from rackrun.training.ranks import Ranks
from rackrun.training.run.checkpoints import RunCheckpoints
from rackrun.training.run.folder import run_name
from rackrun.training.run.metrics import MetricsWriter, lines_until
from rackrun.training.run.progress import Pace, ProgressReporter
from rackrun.training.run.resume import Earlier
from rackrun.training.schedule import Schedule
from rackrun.training.state import TrainingState
from rackrun.units import duration, plural


class RunRecorder:
    """Records a run: every rank has one and sends reports; rank 0 also writes and prints."""

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        schedule: Schedule,
        ranks: Ranks,
        data: Data,
        described: Content,
        identity: Content,
    ) -> None:
        """Take what the run is: `described` for every file of weights, `identity` to resume by."""
        self.folder = folder
        self.progress = ProgressReporter(ranks, schedule, config.epochs)
        self.results = Results(folder, described)
        self._described = described
        self._classes = len(described["classes"])
        self._identity = identity
        self.checkpoints = RunCheckpoints(
            folder, ranks, self.progress, {"identity": identity, **described}
        )
        # Accuracy on noise means nothing.
        self._judges = data.has_evaluation and not config.synthetic
        self.shows_next_batch = ranks.first and not config.synthetic
        self._config = config
        self._schedule = schedule
        self._ranks = ranks
        self._metrics: MetricsWriter | None = None
        self._finished = False
        self._last_epoch = Counts()
        self.sums = Counter(ranks.device)  # stays on the device: reading would wait for the step
        self._pace = Pace()

    def __enter__(self) -> "RunRecorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind:
            self.checkpoints.end(kind)
        if self._metrics:
            self._metrics.end("failed" if kind else "finished" if self._finished else "stopped")

    def begin(self, step: int) -> None:
        """Begin the record after this step: of a new run, or of one that goes on."""
        self.progress.phase(phases.START)
        self._pace.begun = step

    def open(self, step: int, resolved: Content, writes: bool, earlier: Earlier | None) -> None:
        """Write the settings, what they were resolved to, and what came before.

        `writes`: this rank writes checkpoints to the disk of its host.
        """
        self.shows_next_batch = self.shows_next_batch and not self.folder.first_batch.exists()
        if writes:
            self.checkpoints.open(self._config.keep_checkpoints)
        if self._ranks.first:
            self._open_metrics(step, resolved, earlier)
        if earlier:
            self._take_over(step, earlier)

    def _open_metrics(self, step: int, resolved: Content, earlier: Earlier | None) -> None:
        recorded = {
            "task": self._described["task"],
            "name": run_name(self._described["task"]),
            **asdict(self._config),
            "data_sha256": self._identity["data"],
            "data_versions": self._described["data_versions"],
            "resolved": resolved,
        }
        settings = json.dumps(recorded, indent=2, allow_nan=False) + "\n"
        write_whole(self.folder.config, settings.encode())
        lines = lines_until(step, earlier.folder.metrics) if earlier else ()
        before = earlier.folder.path if earlier else None
        about = {
            **recorded,
            "run_id": os.environ.get(variables.RUN_ID, ""),
            "git_commit": resolved["git_commit"],
        }
        self._metrics = MetricsWriter(
            self.folder.metrics, lines, self._config, about, before, self.say
        )
        self._metrics.start(step, self._schedule.epoch(step))
        if earlier:
            self.say(f"resumed after step {step} of {earlier.path}")

    def _take_over(self, step: int, earlier: Earlier) -> None:
        # So that this node could resume alone, it gets what others have.
        if self.checkpoints.writes:
            checkpoint.keep_best(earlier.folder, self.folder)
        # On every node: whichever survives can go on from here without those that saved it.
        path = self.folder.checkpoint(step)
        if self.checkpoints.writes and not path.exists():
            write_whole(path, earlier.data)
        if self.checkpoints.writes:
            self.progress.phase(phases.START, checkpoint=step)
        earlier.release()

    def step(self, step: int) -> None:
        """Report that a step is done."""
        self.checkpoints.report_ended()
        self.progress.step(step)

    def shares(self, step: int, counts: list[int]) -> None:
        """Record the images that each rank gets of a full step after this one (--balance auto)."""
        ranks = self._ranks
        self.checkpoints.images_by_rank = counts
        self.progress.share(counts[ranks.rank] / sum(counts))
        if self._metrics:
            self._metrics.shares(step, self._schedule.epoch(step), dict(enumerate(counts)))

    def say(self, text: str) -> None:
        """Print a line, once for all ranks."""
        self.progress.line(text)

    def remark(self, text: str) -> None:
        """Print a line unless it is empty."""
        if text:
            self.say(text)

    def write_first_batch(self, grid: Content) -> None:
        """Write training images of the first step for the report."""
        self.shows_next_batch = False
        _write_grid(self.folder.first_batch, grid)

    def train(self) -> None:
        """Start the clock: training begins or continues."""
        self.progress.phase(phases.TRAIN)
        self._pace.start()

    def interval(
        self,
        step: int,
        counts: Counts,
        lr: float,
        waiting: Waiting | None,
        scaling: Scaling | None,
    ) -> None:
        """Record the steps since the last call: counts of all ranks, stragglers, skipped steps.

        Raise Diverged if no step can be taken any more.
        """
        self.sums.clear()
        speed, epoch = self._pace.advance(counts, scaling), self._schedule.epoch(step)
        check_finite(step, counts, scaling)
        left = self._pace.seconds_left(step, self._schedule.steps)
        accuracy = None if self._config.synthetic else counts.accuracy
        self.progress.measured(counts.mean_loss, accuracy, speed, left)
        if self._metrics:
            self._metrics.train(step, epoch, counts, speed, lr, scaling)
        if not waiting:
            return
        if self.progress.launched:
            self.progress.slow(*waiting.blamed, waiting.text())
        else:
            self.remark(waiting.text())
        if self._metrics:
            self._metrics.waits(step, epoch, waiting)

    def epoch(self, state: TrainingState, evaluated: Counts | None) -> None:
        """Record the results of an epoch over all ranks, and begin to count the next one."""
        trained, config = self._pace.end_epoch(), self._config
        self._last_epoch = trained.counts
        reported = evaluated if self._judges else None
        if reported and self._metrics:
            epoch = self._schedule.epoch(state.step)
            self._metrics.evaluate(state.step, epoch, reported, self._classes, config.eval_split)
        if not self._ranks.first:
            return
        parts = [f"epoch {state.epoch}/{config.epochs}"]
        if not trained.counts.samples:  # resumed between the epoch's last step and its evaluation
            parts.append("trained before the resume")
        else:
            parts.append(f"loss {trained.counts.mean_loss:.4f}")
            if not config.synthetic:
                parts.append(f"accuracy {trained.counts.accuracy:.2%}")
        if reported:
            self.progress.best_accuracy(state.best)
            parts.append(f"{config.judged_by} loss {reported.mean_loss:.4f}")
            parts.append(f"{config.judged_by} accuracy {reported.accuracy:.2%}")
            if self._classes > TOP5_CLASSES:
                parts.append(f"top 5 {reported.accuracy5:.2%}")
        if trained.counts.samples:
            parts.append(f"{trained.images_per_second:,.0f} images/s")
        if trained.skipped_steps:
            parts.append(f"{plural(trained.skipped_steps, 'step')} skipped (float16 overflow)")
        if skipped := trained.counts.skipped + (evaluated.skipped if evaluated else 0):
            parts.append(f"{plural(skipped, 'image')} skipped")
        self.say("  ".join(parts))

    def finish(self, accuracy: float, report: str) -> None:
        """Report that the run is done, with its accuracy, and print where its results are."""
        if not self._ranks.first:
            self.progress.phase(phases.DONE)
            return
        self._finished = True
        measured = {"accuracy": round(accuracy, 6)} if self._judges else {}
        parts = [f"{self._config.judged_by} accuracy {accuracy:.2%}"] if self._judges else []
        if not self._judges and not self._config.synthetic and self._last_epoch.samples:
            parts = [f"training accuracy {self._last_epoch.accuracy:.2%}"]
        if self._pace.images:
            images_per_second = self._pace.images_per_second
            measured["images_per_second"] = round(images_per_second, 1)
            parts += [
                f"{images_per_second:,.0f} images/s",
                f"training took {duration(self._pace.seconds)}",
            ]
        else:
            parts.append("no step was left to train")
        self.progress.phase(
            phases.DONE,
            **measured,
            final=str(self.folder.final),
            **({"report": report} if report else {}),
        )
        self.say("  ".join(parts))
        if not self.progress.launched:  # a launcher prints it at its own end
            self.say(f"weights: {self.folder.final}" + (f"\nreport: {report}" if report else ""))


class Results:
    """What the newest evaluation leaves for the report, and what a run writes at its end."""

    def __init__(self, folder: RunFolder, described: Content) -> None:
        """Take what goes into every file of weights: task, classes, settings."""
        self._folder = folder
        self._described = described
        self._confusion: NDArray[np.int64] | None = None
        self.hardest_rows: list[int] = []
        """Rows of the validation images with the highest loss."""

    def evaluated(self, confusion: NDArray[np.int64] | None, hardest_rows: list[int]) -> None:
        """Keep the counts of images by label and prediction, if there are some, and these rows."""
        self._confusion, self.hardest_rows = confusion, hardest_rows

    def write(
        self,
        state: TrainingState,
        grid: Content | None,
        hardest: Content | None,
        say: Callable[[str], None],
    ) -> str:
        """Write final.pt, the grids of predictions and the report; return the report's path.

        It is empty where no report can be drawn.
        """
        final = {
            "model": state.evaluated.state_dict(),
            "accuracy": state.accuracy,
            **self._described,
        }
        checkpoint.write(self._folder.final, final)
        if grid and self._confusion is not None:
            grid = {**grid, "confusion": self._confusion}
        for path, content in ((self._folder.predictions, grid), (self._folder.hardest, hardest)):
            if content:
                _write_grid(path, content)
        from rackrun.run_report.page import write  # nothing else here needs what that imports

        try:
            return str(write(self._folder.path))
        except Exception as error:  # whatever it is, the run is done
            say(f"no report: {one_line(str(error))[:300]}")
            return ""


def _write_grid(path: Path, grid: Content) -> None:
    with atomic_write(path) as file, translated_os_errors(path):
        np.savez_compressed(file, **grid)
