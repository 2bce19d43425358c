"""The record of a run: its folder, its checkpoints, and the lines it prints."""

import json
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rackrun.atomic import write_whole
from rackrun.contract import phases
from rackrun.run_folder import RunFolder
from rackrun.units import duration, plural
from training.config import Config, as_plain
from training.counts import TOP5_CLASSES, Counts, Scaling, check_finite, check_weights
from training.monitor.stragglers import Waiting
from training.ranks import Ranks
from training.run import checkpoint
from training.run.checkpoint import BackgroundSaves
from training.run.folder import run_name
from training.run.ledger import Ledger
from training.run.metrics import MetricsWriter, begin_metrics
from training.run.progress import ProgressReporter
from training.run.results import write_grid, write_results
from training.run.resume import Earlier
from training.schedule import Schedule
from training.state import TrainingState

Content = dict[str, Any]


class RunRecorder:
    """Records a run: every rank has one and sends reports; rank 0 also writes and prints."""

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        schedule: Schedule,
        ranks: Ranks,
        described: Content,
        identity: Content,
        ledger: Ledger,
        saves: BackgroundSaves | None,
        judges: bool,
    ) -> None:
        self.folder = folder
        self.progress = ProgressReporter(ranks, schedule, config.epochs)
        self._described = described  # goes into every file of weights
        self._classes = len(described["classes"])
        self._identity = identity
        self._ledger = ledger
        self._saves = saves  # on the rank that writes for all on its disk
        self._judges = judges and not config.synthetic  # predictions of noise mean nothing
        self.shows_next_batch = ranks.first and not config.synthetic
        self._config = config
        self._schedule = schedule
        self._ranks = ranks
        self._journal: MetricsWriter | None = None
        self._finished = False
        self._confusion: NDArray[np.int64] | None = None  # of the newest evaluation
        self.hardest: list[int] = []  # likewise: rows of the highest loss
        self._epoch = Counts()  # since the epoch began, of all ranks
        self._skipped_steps = 0  # of this epoch, as gradients overflowed float16
        self._begun = 0  # the step at which the run began or was resumed
        self._samples = 0  # images since then, of all ranks
        self._seconds = 0.0  # that they took
        self._epoch_seconds = 0.0  # of which in this epoch
        self._clock = time.monotonic()

    def __enter__(self) -> "RunRecorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._saves and kind:
            self._saves.end(kind)
        if self._journal:
            self._journal.end("failed" if kind else "finished" if self._finished else "stopped")

    def begin(self, step: int, earlier: Earlier | None, resolved: Content) -> None:
        """Write the settings and what they were resolved to, before the first step."""
        self.progress.phase(phases.START)
        self._begun = step
        if self._saves:
            checkpoint.remove_partials(self.folder)
        if self._ranks.first:
            self._open_journal(step, earlier, resolved)
        if earlier:
            self._take_over(step, earlier)

    def _open_journal(self, step: int, earlier: Earlier | None, resolved: Content) -> None:
        recorded = {
            "task": self._described["task"],
            "name": run_name(self._described["task"]),
            **as_plain(self._config),
            "data_sha256": self._identity["data"],
            "resolved": resolved,
        }
        settings = json.dumps(recorded, indent=2) + "\n"
        write_whole(self.folder.config, settings.encode())
        before = earlier.folder if earlier else None
        self._journal = begin_metrics(self.folder, self._config, before, step, self.say)
        self._journal.start(step, self._schedule.epoch(step))
        if earlier:
            self.say(f"resumed after step {step} of {earlier.path}")

    def _take_over(self, step: int, earlier: Earlier) -> None:
        """Copy to this node what others have, so that it could resume alone."""
        if self._ranks.first:
            checkpoint.keep_best(earlier.folder, self.folder)
        if self._config.ledger:
            self._ledger.go_on(step, earlier.folder.ledger, earlier.source)
        path = self.folder.checkpoint(step)
        if self._saves and not path.exists():
            write_whole(path, earlier.data)
        if self._saves:
            self.progress.phase(phases.START, checkpoint=step)
        earlier.release()

    def step(self, step: int, rows: torch.Tensor | None) -> None:
        """Report that a step is done, and record the samples it was made of."""
        if self._config.ledger and rows is not None:
            self._ledger.note(rows.numpy())
        if self._saves:
            self._saved(self._saves.ended())
        self.progress.step(step)

    def say(self, text: str) -> None:
        """Print a line, once for all ranks."""
        self.progress.line(text)

    def remark(self, text: str) -> None:
        """Print a line unless it is empty."""
        if text:
            self.say(text)

    def first_batch(self, grid: Content) -> None:
        """Write training images of the first step for the report."""
        self.shows_next_batch = False
        write_grid(self.folder.first_batch, grid)

    def train(self) -> None:
        """Start the clock: training begins or continues."""
        self.progress.phase(phases.TRAIN)
        self._clock = time.monotonic()
        self._epoch_seconds = 0.0

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
        self._measured(step, counts, lr, scaling)
        if waiting:
            self._waited(step, waiting)

    def _measured(self, step: int, counts: Counts, lr: float, scaling: Scaling | None) -> None:
        seconds = time.monotonic() - self._clock
        self._clock += seconds
        self._seconds += seconds
        self._epoch_seconds += seconds
        self._samples += counts.samples
        self._epoch = self._epoch.plus(counts)
        check_finite(step, counts, scaling)
        self._skipped_steps += scaling.skipped if scaling else 0
        speed = counts.samples / seconds
        left = (self._schedule.steps - step) * self._seconds / max(step - self._begun, 1)
        accuracy = None if self._config.synthetic else counts.accuracy
        self.progress.measured(counts.mean_loss, accuracy, speed, left)
        if self._journal:
            self._journal.train(step, self._schedule.epoch(step), counts, speed, lr, scaling)

    def _waited(self, step: int, waiting: Waiting) -> None:
        if self.progress.launched:
            self.progress.slow(*waiting.blamed, waiting.text())
        elif text := waiting.text():
            self.say(text)
        if self._journal:
            self._journal.waits(step, self._schedule.epoch(step), waiting)

    def epoch(self, state: TrainingState, evaluated: Counts | None) -> None:
        """Record the results of an epoch over all ranks, and begin to count the next one."""
        trained, self._epoch = self._epoch, Counts()
        if not self._ranks.first:
            return
        parts = [f"epoch {state.epoch}/{self._config.epochs}"]
        if trained.samples:
            parts += _loss_and_accuracy("", trained)[: 1 if self._config.synthetic else None]
        else:  # resumed from a checkpoint between the epoch's last step and its evaluation
            parts.append("trained before the resume")
        if evaluated and self._judges:
            parts += _loss_and_accuracy(f"{self._config.judged_by} ", evaluated)
            if self._classes > TOP5_CLASSES:
                parts.append(f"top 5 {evaluated.accuracy5:.2%}")
            self._note(state.step, evaluated)
            self.progress.best_accuracy(state.best)
        if trained.samples:
            parts.append(f"{trained.samples / max(self._epoch_seconds, 1e-9):,.0f} images/s")
        if self._skipped_steps:
            parts.append(f"{plural(self._skipped_steps, 'step')} skipped (float16 overflow)")
            self._skipped_steps = 0
        if skipped := trained.skipped + (evaluated.skipped if evaluated else 0):
            parts.append(f"{plural(skipped, 'image')} skipped")
        self.say("  ".join(parts))

    def _note(self, step: int, evaluated: Counts) -> None:
        if self._journal:
            epoch, split = self._schedule.epoch(step), self._config.eval_split
            self._journal.evaluate(step, epoch, evaluated, self._classes, split)

    def confused(self, counts: torch.Tensor, classes: int) -> None:
        """Store the counts of validation images by label and prediction, for the report."""
        if classes and self._ranks.first:
            self._confusion = counts.long().reshape(classes, classes).cpu().numpy()

    def save(self, state: TrainingState, best: bool = False) -> None:
        """Begin to write a checkpoint, which gets a second name if it is the best so far.

        Raise Diverged if no run could continue from it, before the next line of the log does.
        """
        self.progress.phase(phases.SAVE)
        check_weights(state.step, not self._ranks.all_reduce_max(int(not state.is_finite)))
        self.wait_for_save()
        self._ledger.write()
        statistics = self._ranks.gather_statistics(state.model)
        for model in state.models:
            self._ranks.share_statistics(model)
        if self._saves:
            content = {"identity": self._identity, "state": state.state_dict(), **self._described}
            self._saves.begin({**content, "statistics": statistics}, best)
        self._ranks.restore_statistics(state.model, statistics)
        self.progress.phase(phases.TRAIN)

    def wait_for_save(self) -> None:
        """Wait until the last checkpoint is written; raise SaveError if that fails."""
        if self._saves:
            self.progress.phase(phases.SAVE)
            self._saved(self._saves.wait())

    def _saved(self, step: int) -> None:
        """Report that the checkpoint of a step is written, unless the step is 0."""
        if step:
            self.progress.phase(self.progress.current_phase, checkpoint=step)

    def restore_best(self, state: TrainingState) -> None:
        """Give the first rank, which writes final.pt, the weights with the best evaluation."""
        if self._ranks.first and self.folder.best.exists():
            best = checkpoint.read(self.folder.best)["state"]
            state.evaluated.load_state_dict(best["average"] or best["model"])
            state.accuracy = best["accuracy"]

    def finish(
        self,
        state: TrainingState,
        grid: Content | None,
        hardest: Content | None,
        speed: Content | None = None,
    ) -> None:
        """Write final.pt, the grids of predictions and the report, and print where they are."""
        if not self._ranks.first:
            self.progress.phase(phases.DONE)
            return
        final = {
            "model": state.evaluated.state_dict(),
            "accuracy": state.accuracy,
            **self._described,
        }
        if grid and self._confusion is not None:
            grid = {**grid, "confusion": self._confusion}
        page = write_results(self.folder, final, grid, hardest, self.say)
        self._finished = True
        measured = {"accuracy": round(state.accuracy, 6)} if self._judges else {}
        parts = [f"{self._config.judged_by} accuracy {state.accuracy:.2%}"] if self._judges else []
        if self._samples:
            images_per_second = self._samples / max(self._seconds, 1e-9)
            measured["images_per_second"] = round(images_per_second, 1)
            parts += [
                f"{images_per_second:,.0f} images/s",
                f"training took {duration(self._seconds)}",
            ]
        else:
            parts.append("no step was left to train")
        self.progress.phase(
            phases.DONE,
            **measured,
            final=str(self.folder.final),
            **({"report": page} if page else {}),
            **({"speed": speed} if speed else {}),
        )
        self.say("  ".join(parts))
        if not self.progress.launched:  # a launcher prints it at its own end
            self.say(f"weights: {self.folder.final}" + (f"\nreport: {page}" if page else ""))


def _loss_and_accuracy(what: str, counts: Counts) -> list[str]:
    return [f"{what}loss {counts.mean_loss:.4f}", f"{what}accuracy {counts.accuracy:.2%}"]
