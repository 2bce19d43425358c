"""The record of a run: its folder, its metrics, the lines it prints, and its results."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from rackrun.atomic import atomic_write, translated_os_errors, write_whole
from rackrun.contract import phases
from rackrun.run_folder import RunFolder
from rackrun.terminal import one_line
from rackrun.training import checkpoint
from rackrun.training.checkpoint import Content
from rackrun.training.config import Config
from rackrun.training.counts import TOP5_CLASSES, Counter, Counts, Scaling, check_finite
from rackrun.training.data.open import Data
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
        self.shows_next_batch = False
        self._config = config
        self._schedule = schedule
        self._ranks = ranks
        self._metrics: MetricsWriter | None = None
        self._earlier: Earlier | None = None
        self.resolved: Content | None = None
        """What the settings were resolved to, in the first group of the run."""
        self._finished = False
        self.sums = Counter(ranks.device)  # stays on the device: reading would wait for the step
        self.logged = 0  # the last step of which the sums are in the metrics
        self._handed_over: dict[str, torch.Tensor] = {}  # files of another host
        self._pace = Pace()

    def __enter__(self) -> "RunRecorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind:
            self.checkpoints.end(kind)
        if self._metrics:
            self._metrics.end("failed" if kind else "finished" if self._finished else "stopped")

    def begin(self, step: int, earlier: Earlier | None) -> None:
        """Begin the record after this step: of a new run, or of one that goes on."""
        self.progress.phase(phases.START)
        self._pace.begun = self.logged = step
        self._earlier = earlier
        # Any rank of an elastic run may become the first one, and then has to know all lines.
        if self._ranks.first or self._config.elastic:
            before = earlier.folder.metrics if earlier else None
            lines = lines_until(step, before) if before else ()
            self._metrics = MetricsWriter(self.folder.metrics, lines)
            self._metrics.start(step, self._schedule.epoch(step))

    def enter(self, ranks: Ranks, writes: bool) -> None:
        """Go on in a group: as its first rank, as one that writes to a disk, or as another one."""
        self._ranks = ranks
        self.shows_next_batch = ranks.first and not (
            self._config.synthetic or self.folder.first_batch.exists()
        )
        self.progress.enter(ranks)
        self.checkpoints.enter(ranks, writes, self._config.keep_checkpoints)
        self._keep_files()

    def _keep_files(self) -> None:
        # Those that another host has handed over, in place of those that are here.
        files, self._handed_over = self._handed_over, {}
        if not files or not self.checkpoints.writes:
            return
        if (best := files.pop(self.folder.best.name, None)) is not None:
            write_whole(self.folder.best, best.numpy().tobytes())

    def open(self, step: int, resolved: Content) -> None:
        """Write the settings and what they were resolved to, and all that came before."""
        self.resolved = resolved
        if self._ranks.first:
            self._open_metrics(step)
        if self._earlier:
            self._take_over(step, self._earlier)
        self._earlier = None

    def _open_metrics(self, step: int) -> None:
        recorded = {
            "task": self._described["task"],
            "name": run_name(self._described["task"]),
            **asdict(self._config),
            "data_sha256": self._identity["data"],
            "data_versions": self._described["data_versions"],
            "resolved": self.resolved,
        }
        settings = json.dumps(recorded, indent=2) + "\n"
        write_whole(self.folder.config, settings.encode())
        earlier = self._earlier
        if self._metrics:
            before = earlier.folder.path if earlier else None
            self._metrics.open(self._config, before, self.say)
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

    @property
    def is_in_run(self) -> bool:
        """Return whether this rank has been in a group of the run."""
        return self.resolved is not None

    @property
    def position(self) -> list[int]:
        """How far the record of this rank is: whether it is in a run at all, and what it logged."""
        return [int(self.is_in_run), self.logged]

    def state_dict(self, files: bool) -> Content:
        """Return what another rank needs to go on with this record, as it has joined or is behind.

        `files`: with those of the run folder, for a host that lacks them.
        """
        lines = self._metrics.lines if self._metrics else []
        best = (self._earlier.folder if self._earlier else self.folder).best
        return {
            "lines": lines,
            "resolved": json.dumps(self.resolved),
            "pace": self._pace.state_dict(),
            "steps": [self.logged, self.checkpoints.owed],
            "files": {
                path.name: torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
                for path in ([best] if files else [])
                if path.exists()
            },
        }

    def load_state_dict(self, record: Content) -> None:
        """Take over what `state_dict` returned on another rank."""
        self._earlier = None
        if self._metrics:
            self._metrics.lines[:] = record["lines"]
        self.resolved = json.loads(record["resolved"])
        self._pace.load_state_dict(record["pace"])
        logged, owed = record["steps"]
        if logged != self.logged:  # the sums here are of steps that the others have logged
            self.sums.clear()
        self.logged, self.checkpoints.owed = logged, owed
        self._handed_over = record["files"]

    def shares(self, step: int, counts: list[int]) -> None:
        """Record the images that each rank gets of a full step after this one (--balance auto)."""
        ranks = self._ranks
        self.checkpoints.images_by_rank = counts
        self.progress.share(counts[ranks.rank] / sum(counts))
        if self._metrics:
            by_member = dict(zip(ranks.members or range(ranks.world), counts, strict=True))
            self._metrics.shares(step, self._schedule.epoch(step), by_member)

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
        self.logged = step
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
            (rank, why), members = waiting.blamed, self._ranks.members
            # In an elastic run, a launcher knows a rank by its member, not by its place in a group.
            member = members[rank] if members and rank >= 0 else rank
            self.progress.slow(member, why, waiting.text())
        else:
            self.remark(waiting.text())
        if self._metrics:
            self._metrics.waits(step, epoch, waiting)

    def epoch(self, state: TrainingState, evaluated: Counts | None) -> None:
        """Record the results of an epoch over all ranks, and begin to count the next one."""
        trained, config = self._pace.end_epoch(), self._config
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

    def evaluated(self, confusion: torch.Tensor, classes: int, hardest_rows: list[int]) -> None:
        """Keep the counts of images by label and prediction, if there are some, and these rows."""
        self.hardest_rows = hardest_rows
        if classes:
            self._confusion = confusion.long().reshape(classes, classes).cpu().numpy()

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
