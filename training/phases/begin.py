"""The last phase before the first step: build the model, open the run folder, load weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.units import plural
from training.config import as_plain
from training.models.initial import extended, load_initial_weights
from training.phases.start import TrainingRun
from training.run import compatibility, resolved
from training.run.checkpoint import BackgroundSaves
from training.run.compilation import compilation_reported
from training.run.folder import own_folder, writes_to
from training.run.ledger import Ledger
from training.run.recorder import RunRecorder
from training.run.tracker import check_trackers
from training.schedule import check_scaled_lr
from training.state import TrainingState


def new_state(run: TrainingRun) -> TrainingState:
    """Return the state to train: the task's model on the device, optimizer, average of weights."""
    config, compute, classes = run.config, run.compute, len(run.data.classes)
    model = extended(run.task.built(config, classes), config, classes)
    state = TrainingState(compute.placed(model), config, float16=compute.precision == "fp16")
    if compute.compile and state.average:
        state.average.model.compile()  # the copy of a compiled model is not compiled
    return state


@contextmanager
def begin(run: TrainingRun, state: TrainingState) -> Iterator[RunRecorder]:
    """Open the run folder, load the weights or checkpoint of the settings; yield the recorder."""
    _check_judged(run)
    check_scaled_lr(run.config, run.schedule.peak, run.data.batch)
    if run.ranks.first:
        check_trackers(run.config.trackers)
    with (
        _recorder(run, state) as log,
        compilation_reported(log.progress, run.compute.compile),
    ):
        _load(run, state, log)
        for remark in _remarks(run):
            log.say(remark)
        yield log


def _load(run: TrainingRun, state: TrainingState, log: RunRecorder) -> None:
    """Load the weights or checkpoint to start from; record the settings and their resolution."""
    config, changed = run.config, ""
    if run.earlier:
        changed = compatibility.changes(as_plain(config), run.earlier.content)
        state.load_state_dict(run.earlier.content["state"])
        run.ranks.restore_statistics(state.model, run.earlier.content.get("statistics"))
    facts = resolved.resolved(config, run.ranks, run.data, state.model, run.compute.precision)
    for line in resolved.lines(facts, log.folder.path):
        log.say(line)
    log.progress.reads(", ".join(resolved.images(facts)))
    log.begin(state.step, run.earlier, facts)
    log.remark(f"settings changed since the checkpoint: {changed}" if changed else "")
    log.remark(compatibility.order(run.data.lanes, run.earlier.content) if run.earlier else "")
    if config.earlier_attempts and not run.earlier:
        log.say("no checkpoint from earlier attempts; starting from scratch")
    if config.weights and not run.earlier and not config.synthetic:
        classes = len(run.data.classes)
        log.say(load_initial_weights(state.model, classes, config, run.ranks, log.progress))
        state.start_average()


def _check_judged(run: TrainingRun) -> None:
    """Raise UsageError if the schedule needs evaluations and there is no split to evaluate."""
    config = run.config
    if run.data.judges or not (config.patience or config.lr_schedule == "plateau"):
        return
    option = "--patience" if config.patience else "--lr-schedule plateau"
    raise UsageError(
        f"{config.data}: no split {config.eval_split!r}, which {option} needs; type --patience 0"
        f" --lr-schedule cosine, or hold one out with {called('convert')}"
    )


def _recorder(run: TrainingRun, state: TrainingState) -> RunRecorder:
    """Return the recorder of the run; raise SaveError if its checkpoint does not fit the run."""
    config, data = run.config, run.data
    described = {
        "task": run.task.name,
        "classes": list(data.classes),
        "dataset": data.dataset,
        "preparation": asdict(run.task.transformed(config, config.epochs - 1)),
        "config": as_plain(config),
        "lanes": data.lanes,
    }
    identity = compatibility.identity(
        described, state.model, data.digest, data.batch, data.epoch_steps
    )
    if run.earlier:
        compatibility.check(identity, described, run.earlier.content, run.earlier.path)
    folder = own_folder(run.task.name, config.run_folder, run.ranks)
    writes = writes_to(folder, run.ranks)
    ledger = Ledger(folder.ledger, run.ranks, writes, data.rows, data.epoch_steps)
    saves = BackgroundSaves(folder, config.keep_checkpoints) if writes else None
    return RunRecorder(
        folder, config, run.schedule, run.ranks, described, identity, ledger, saves, data.judges
    )


def _remarks(run: TrainingRun) -> list[str]:
    config, remarks = run.config, []
    if not run.data.judges:
        remarks.append(
            f"{config.data} has no split {config.eval_split!r}: trains without evaluation;"
            f" {called('convert')} can hold one out"
        )
    remarks += filter(None, (run.compute.remark(config), run.data.remark))
    if config.scale_lr:
        remarks.append(
            f"lr {config.lr:g} for {plural(config.batch_size, 'image')}, {run.schedule.peak:g}"
            f" for {run.data.batch} (--scale-lr)"
        )
    return remarks
