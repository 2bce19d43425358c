"""The log of a run: reports, lines, metrics.jsonl, TensorBoard, trackers.

    every rank    reports where it is to the launcher, which shows it and notices hangs
    rank 0        prints lines, appends to metrics.jsonl, and hands its lines to loggers

Counts are summed first and divided last: over batches, over ranks, over an epoch, each image has
the same weight.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rackrun.atomic import translated_os_errors, write_whole
from rackrun.contract import phases, variables
from rackrun.reports import Reporter, rank_number
from rackrun.run_folder import RunFolder
from rackrun.training.config import Config
from rackrun.training.counts import TOP5_CLASSES, Counts
from rackrun.training.data.interface import Data
from rackrun.training.data.ring import Batch
from rackrun.training.divergence import check_finite
from rackrun.training.lines import (
    advice_on_waits,
    epoch_line,
    last_line,
    progress_line,
)
from rackrun.training.ranks import Ranks
from rackrun.training.schedule import Schedule
from rackrun.training.state import TrainingState
from rackrun.training.stragglers import Waiting
from rackrun.training.track.tensorboard import TensorBoard
from rackrun.training.track.tracker import Line, Tracker, hand_on

CLEAR_LINE = "\r\x1b[K"
JUDGED_STEPS = 20  # before how long ranks wait for data says something
REPORTED_SECONDS = 5.0  # of waiting for a batch


class Log:
    """The log of a run on this rank; trackers learn how the run ended when its context ends."""

    folder: RunFolder
    """Set before the first line, once what the run goes on from has been found to fit."""

    def __init__(self, config: Config, schedule: Schedule, ranks: Ranks, data: Data) -> None:
        self.launched = bool(os.environ.get(variables.REPORTS))
        """Whether a launcher takes the reports and shows them."""
        self._config, self._schedule, self._ranks = config, schedule, ranks
        self._classes = len(data.classes)
        self._judges = data.has_evaluation and not config.synthetic  # on noise it means nothing
        self._reporter = Reporter(rank_number(), epochs=config.epochs, steps=schedule.steps)
        self._is_live = ranks.first and not self.launched and sys.stdout.isatty()
        self._loggers: list[TensorBoard | Tracker] = []
        self._is_open = False  # on the rank that writes metrics.jsonl
        self._is_finished = False
        self._result = dict[str, float]()  # the last and the best accuracy
        self._begun = 0  # the step at which the run began or was resumed
        self._total = Counts()  # since then
        self._epoch = self._last_epoch = Counts()
        self._clock = time.monotonic()
        self._has_advised = False

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        verdict = "failed" if kind else "finished" if self._is_finished else "stopped"
        for logger in self._loggers:
            logger.end(verdict, self._result)

    def open(
        self, state: TrainingState, settings: dict[str, Any], earlier: RunFolder | None
    ) -> None:
        """Begin the files, on rank 0, with the lines of an earlier run up to this step.

        `settings` are those of config.json, for trackers.
        """
        self._begun = state.step
        if not self._ranks.first:
            return
        lines = lines_until(state.step, earlier.metrics) if earlier else []
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        write_whole(self.folder.metrics, text.encode())
        if any(line["kind"] == "evaluate" for line in lines):
            self._result = {"accuracy": state.accuracy, "best": state.best}
        if self._config.tensorboard:
            self._loggers.append(TensorBoard(self.folder, self._config, lines))
        for name in self._config.trackers:
            if earlier:
                hand_on(earlier.path, self.folder.path, name)
            self._loggers.append(Tracker(name, self.folder.path, settings, lines, self.say))
        self._is_open = True
        self._write("start", state.step)

    @property
    def current_phase(self) -> str:
        """The phase that was reported last."""
        return str(self._reporter.fields["phase"])

    def phase(self, name: str, **fields: Any) -> None:
        """Report, at once, that another phase begins."""
        self._reporter.fields |= {"phase": name, **fields}
        self._reporter.send()

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Report a phase, and the one before it again at the end."""
        before = self.current_phase
        self.phase(name)
        yield
        self.phase(before)

    def waits_reported(self, batches: Iterator[Batch]) -> Generator[Batch]:
        """Yield all batches; report the phase "data" while one is late, and then the one before.

        A server may be away for as long as its client has patience (shards.http_source): a rank
        that waits for it does not hang. The report comes from the loop's own thread, by a signal:
        it is a sign of life.
        """
        while True:
            before = self.current_phase
            # No handler stays across a yield: an iterator that Ctrl-C leaves behind may be closed
            # by any thread, and only the main thread may restore one.
            handler = signal.signal(signal.SIGALRM, lambda *_: self.phase(phases.DATA))
            try:
                signal.setitimer(signal.ITIMER_REAL, REPORTED_SECONDS)
                batch = next(batches, None)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)  # first: `handler` may not take an alarm
                signal.signal(signal.SIGALRM, handler)
            if self.current_phase == phases.DATA:
                self.phase(before)
            if batch is None:
                return
            yield batch

    def say(self, text: str) -> None:
        """Print a line, once for all ranks; nothing if it is empty."""
        if text and self._ranks.first:
            sys.stdout.write(f"{CLEAR_LINE if self._is_live else ''}{text}\n")
            sys.stdout.flush()

    def train(self) -> None:
        """Start the clock, which stands still while a run evaluates: training goes on."""
        self.phase(phases.TRAIN)
        self._clock = time.monotonic()

    def report(self, **fields: Any) -> None:
        """Report new values within a phase, unless the last report was a moment ago."""
        self._reporter.report(self.current_phase, fields)

    def step(self, step: int) -> None:
        """Report that a step is done."""
        epoch_steps = self._schedule.epoch_steps
        epoch = (step - 1) // epoch_steps
        self.report(
            epoch=epoch + 1,
            step=step,
            epoch_step=step - epoch * epoch_steps,
            epoch_steps=epoch_steps,
        )

    def note_rows(self, step: int, batch: Batch) -> None:
        """Write the rows of this rank's batch where RACKRUN_NOTE_ROWS is set, which tests do.

        To rows/rank-N.jsonl, before the step is computed: it may count although this rank is killed
        a moment later. A step that is lost is trained again, and has a newer line of each rank.
        """
        if variables.NOTE_ROWS not in os.environ or batch.rows is None:
            return
        rank, world = self._ranks.rank, self._ranks.world
        noted = {"step": step, "world": world, "rank": rank, "rows": batch.rows.tolist()}
        path = self.folder.path / "rows" / f"rank-{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps({"time": time.time(), **noted}) + "\n")

    def show(self, text: str) -> None:
        """Print progress where no launcher shows it; on a terminal the next line replaces it."""
        if self._ranks.first and not self.launched:
            sys.stdout.write(f"{CLEAR_LINE}{text}" if self._is_live else f"{text}\n")
            sys.stdout.flush()

    def interval(self, step: int, counts: Counts, lr: float, loss_scale: float) -> None:
        """Record the steps since the last call, with counts of all ranks.

        Raise Diverged if no step can be taken any more.
        """
        seconds = max(time.monotonic() - self._clock, 1e-9)
        self._clock += seconds
        check_finite(step, counts, loss_scale)
        counts = counts._replace(seconds=seconds)
        self._total, self._epoch = self._total.plus(counts), self._epoch.plus(counts)
        measured = {
            "loss": round(counts.mean_loss, 6),
            "accuracy": round(counts.accuracy, 6),
            "images_per_second": round(counts.images_per_second, 1),
            "data_share": round(counts.data_share, 4),
        }
        scaled = {"loss_scale": loss_scale, "skipped_steps": counts.skipped_steps}
        self._write("train", step, **measured, rate=lr, **(scaled if loss_scale else {}))
        if self._config.synthetic:  # accuracy on noise means nothing, and nothing is read
            del measured["accuracy"], measured["data_share"]
        self._reporter.fields |= measured
        done = step - self._begun
        left = (self._schedule.steps - step) * self._total.seconds / max(done, 1)
        self.show(progress_line(self._reporter.fields, left))
        if done >= JUDGED_STEPS and not self._has_advised and not self._config.synthetic:
            advice = advice_on_waits(self._config, self._ranks, self._total.data_share)
            self._has_advised = bool(advice)
            self.say(advice)

    def waits(self, step: int, waiting: Waiting) -> None:
        """Record and say which rank waited for which, in shares of a step."""
        if not self.launched:
            self.say(waiting.text())
        elif self._ranks.first:
            rank, why = waiting.blamed
            self._reporter.fields |= {"slow_rank": rank, "slow_why": why, "slow": waiting.text()}
            self._reporter.send()
        waited, network = waiting.waited / waiting.step, waiting.network / waiting.step
        values = {"waited": round(waited, 4), "network": round(network, 4)}
        self._write("waits", step, rank=waiting.rank, why=waiting.why, **values)

    def shares(self, step: int, counts: list[int]) -> None:
        """Record the images that each rank gets of a full step after this one (--balance auto)."""
        self._reporter.fields["share"] = round(counts[self._ranks.rank] / sum(counts), 6)
        self._write("shares", step, images=dict(enumerate(counts)))

    def epoch(self, state: TrainingState, evaluated: Counts | None) -> None:
        """Record the results of an epoch over all ranks, and begin to count the next one."""
        trained, judged = self._epoch, evaluated if self._judges else None
        self._last_epoch, self._epoch = trained, Counts()
        has_top5 = self._classes > TOP5_CLASSES
        if judged:
            self._write(
                "evaluate",
                state.step,
                split=self._config.eval_split,
                loss=round(judged.mean_loss, 6),
                top1=round(judged.accuracy, 6),
                top5=round(judged.accuracy5, 6) if has_top5 else None,
                samples=judged.samples,
            )
            self._reporter.fields["best"] = round(state.best, 6)
            self._result = {"accuracy": round(judged.accuracy, 6), "best": round(state.best, 6)}
        skipped = trained.skipped + (evaluated.skipped if evaluated else 0)
        self.say(epoch_line(self._config, state.epoch, trained, judged, has_top5, skipped))

    def finish(self, accuracy: float, report: str) -> None:
        """Report that the run is done, with its accuracy, and print where its results are."""
        if not self._ranks.first:
            self.phase(phases.DONE)
            return
        self._is_finished = True
        measured = dict[str, object]({"report": report} if report else {})
        if self._judges:
            # A resumed run without a step left has evaluated nothing itself.
            best = self._result.get("best", accuracy)
            measured |= {"accuracy": round(accuracy, 6), "best": round(best, 6)}
        elif self._last_epoch.samples and not self._config.synthetic:
            # The reports have that of the last steps, which may be of a few images.
            measured["accuracy"] = round(self._last_epoch.accuracy, 6)
        if self._total.samples:
            measured["images_per_second"] = round(self._total.images_per_second, 1)
        self.phase(phases.DONE, **measured, final=str(self.folder.final))
        judged = accuracy if self._judges else None
        self.say(last_line(self._config, judged, self._last_epoch, self._total))
        if not self.launched:  # a launcher prints it at its own end
            self.say(f"weights: {self.folder.final}" + (f"\nreport: {report}" if report else ""))

    def _write(self, kind: str, step: int, **values: Any) -> None:
        if not self._is_open:
            return
        epoch = round(self._schedule.epoch(step), 4)
        line = {"kind": kind, "step": step, "epoch": epoch, **values, "time": round(time.time(), 3)}
        path = self.folder.metrics
        with translated_os_errors(path), path.open("a") as file:
            file.write(f"{json.dumps(line, allow_nan=False)}\n")
        for logger in self._loggers:
            logger.log(line)


def lines_until(step: int, path: Path) -> list[Line]:
    """Return the whole lines of a file of metrics up to a step."""
    text = path.read_text() if path.exists() else ""
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in map(json.loads, whole) if line["step"] <= step]
