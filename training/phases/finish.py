"""The end of a run: final.pt, and the report with images and predictions."""

from rackrun.training.phases.evaluate import predictions
from rackrun.training.phases.start import TrainingRun
from rackrun.training.run.recorder import RunRecorder
from rackrun.training.state import TrainingState
from rackrun.units import plural


def finish(run: TrainingRun, state: TrainingState, log: RunRecorder) -> None:
    """Write final.pt and the report."""
    log.checkpoints.wait()
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
    log.finish(state.accuracy, report)
