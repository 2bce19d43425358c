"""The end of a run: its measurements, final.pt, and the report with images and predictions."""

from collections.abc import Iterator

from rackrun.contract import phases
from rackrun.units import plural
from training.data.samples import Batch
from training.phases.evaluate import predictions
from training.phases.measure import measure
from training.phases.start import TrainingRun
from training.run.recorder import RunRecorder
from training.state import TrainingState
from training.sync.gradient_sync import GradientSync


def finish(
    run: TrainingRun, state: TrainingState, log: RunRecorder, batches: Iterator[Batch]
) -> None:
    """Write final.pt and the report; with --synthetic, first print the parts of a step's time."""
    log.checkpoints.wait()
    speed = None
    if run.config.synthetic:
        log.progress.phase(phases.MEASURE)
        transforms = run.task.transforms(run.config, run.config.epochs - 1)
        sync = GradientSync(run.config, run.ranks, state, run.schedule.steps)
        profile = measure(
            state, sync, transforms, run.compute, run.ranks, batches, run.config.local_sgd_steps
        )
        log.say(profile.table())
        speed = profile.report()
    if state.exhausted:
        log.say(
            f"ends after epoch {state.epoch}: {plural(state.improvement.stale, 'evaluation')}"
            " without a better one (--patience)"
        )
    if run.config.final == "best":
        log.checkpoints.restore_best(state)
    report = ""
    if run.ranks.first:
        rows = log.results.hardest_rows
        hardest = predictions(run, state, rows) if rows else None
        report = log.results.write(state, predictions(run, state), hardest, log.say)
    log.finish(state.accuracy, report, speed)
    if run.membership:
        run.ranks.all_reduce_max(0)  # if rank 0 is lost before, another writes the results
        run.membership.leave()
