"""The last phase before the first step: build the model, load weights, open the run folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from rackrun.contract import phases
from rackrun.training.data.order.cut import Cut
from rackrun.training.dry_step import require_copy
from rackrun.training.models.published import downloaded_weights
from rackrun.training.models.recomputed import with_recomputed_blocks
from rackrun.training.models.weights import load_weights
from rackrun.training.phases import resolved
from rackrun.training.phases.start import TrainingRun
from rackrun.training.run import compatibility
from rackrun.training.run.folder import own_folder, writes_to
from rackrun.training.run.progress import compilation_reported
from rackrun.training.run.recorder import RunRecorder
from rackrun.training.schedule import check_scaled_lr
from rackrun.training.state import TrainingState
from rackrun.training.track.tracker import check_trackers


def new_state(run: TrainingRun) -> TrainingState:
    """Return the state to train: the task's model on the device, optimizer, average of weights."""
    config, compute, classes = run.config, run.compute, len(run.data.classes)
    model = run.task.built(config, classes)
    if config.gradient_checkpointing:
        with_recomputed_blocks(model)
    if config.ema_decay:
        require_copy(model, config)
    state = TrainingState(compute.placed(model), config, float16=compute.precision == "fp16")
    if compute.compile and state.average:
        state.average.model.compile()  # the copy of a compiled model is not compiled
    return state


@contextmanager
def begin(run: TrainingRun, state: TrainingState) -> Iterator[RunRecorder]:
    """Load the weights or checkpoint of the settings; yield the recorder of the run."""
    check_scaled_lr(run.config, run.schedule.peak, run.data.batch)
    with (
        _recorder(run, state) as log,
        compilation_reported(log.progress, run.compute.compile),
    ):
        if run.earlier:
            # Unnamed: this frame lasts as long as the run, and would keep the content in memory.
            state.load_state_dict(run.earlier.content["state"])
            run.ranks.restore_statistics(state.model, run.earlier.content.get("statistics"))
            _restore_cut(run, run.earlier.content.get("images_by_rank"))
        log.begin(state.step)
        # Before the folder: a file that does not fit ends the run while nothing is written.
        loaded = _load_weights(run, state, log)
        open_folder(run, state, log)
        log.remark(loaded)
        yield log


def _recorder(run: TrainingRun, state: TrainingState) -> RunRecorder:
    # SaveError if the checkpoint does not fit the run.
    config, data = run.config, run.data
    described = {
        "task": run.task.name,
        "classes": list(data.classes),
        "dataset": data.dataset,
        "preparation": asdict(run.transforms),
        "config": asdict(config),
        "lanes": data.lanes,
        "data_versions": data.versions,
    }
    identity = compatibility.identity(
        described, state.model, data.digest, data.batch, data.epoch_steps
    )
    if run.earlier:
        compatibility.check(identity, described, run.earlier.content, run.earlier.path)
    folder = own_folder(run.task.name, config.run_folder, run.ranks)
    return RunRecorder(folder, config, run.schedule, run.ranks, data, described, identity)


def _restore_cut(run: TrainingRun, counts: object) -> None:
    # Steps are cut as they were before, if that was among as many ranks. A checkpoint may hold
    # anything.
    if run.config.balance != "auto" or not isinstance(counts, list):
        return
    is_cut = all(isinstance(count, int) and count > 0 for count in counts)
    if is_cut and len(counts) == run.ranks.world and sum(counts) == run.data.batch:
        run.data.recut(Cut.into(counts))


def _load_weights(run: TrainingRun, state: TrainingState, log: RunRecorder) -> str:
    config = run.config
    if not config.weights or run.earlier or config.synthetic:
        return ""
    log.progress.phase(phases.DOWNLOAD)
    path = downloaded_weights(config.weights, config.model, run.ranks)
    log.progress.phase(phases.START)
    line = load_weights(state.model, path, run.data.classes, run.transforms)
    state.start_average()
    return line


def open_folder(run: TrainingRun, state: TrainingState, log: RunRecorder) -> None:
    """Open the run's folder; write and print the resolved settings."""
    config = run.config
    if run.ranks.first:
        check_trackers(config.trackers)
    writes = writes_to(log.folder, run.ranks)
    facts = resolved.resolved(config, run.ranks, run.data, state.model, run.compute.precision)
    for line in resolved.first_lines(run, state, facts, log.folder.path):
        log.say(line)
    log.progress.reads(", ".join(resolved.images(facts)))
    changed = order = ""
    if run.earlier:
        changed = compatibility.changes(asdict(config), run.earlier.content)
        order = compatibility.order(run.data.lanes, run.earlier.content)
    # From here on the checkpoint's content is freed.
    log.open(state.step, facts, writes, run.earlier)
    log.remark(f"settings changed since the checkpoint: {changed}" if changed else "")
    log.remark(order)
    if config.earlier_attempts and not run.earlier:
        log.say("no checkpoint from earlier attempts; starting from scratch")
    for remark in resolved.remarks(run):
        log.say(remark)
