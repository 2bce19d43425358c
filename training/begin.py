"""The last part before the first step: a checkpoint or weights, the run folder, first lines."""

from dataclasses import asdict

from rackrun.contract import phases
from rackrun.training import first_lines
from rackrun.training.data.order import Cut
from rackrun.training.models.published import downloaded_weights
from rackrun.training.models.weights import load_weights
from rackrun.training.run import compatibility
from rackrun.training.run.folder import writes_to
from rackrun.training.setup import TrainingRun
from rackrun.training.track.tracker import check_trackers


def begin(run: TrainingRun) -> None:
    """Load the checkpoint or the weights of a run, open its folder, print its first lines."""
    state, log, earlier = run.state, run.log, run.earlier
    if earlier:
        state.load_state_dict(earlier.content["state"])
        run.ranks.restore_statistics(state.model, earlier.content.get("statistics"))
        _restore_cut(run, earlier.content.get("images_by_rank"))
    log.begin(state.step)
    # Before the folder: a file that does not fit ends the run while nothing is written.
    loaded = _load_weights(run)
    if run.ranks.first:
        check_trackers(run.config.trackers)
    writes = writes_to(log.folder, run.ranks)
    facts = first_lines.facts_of(
        run.config, run.ranks, run.data, state.model, run.compute.precision
    )
    for line in first_lines.lines_of(run, facts):
        log.say(line)
    log.progress.reads(", ".join(first_lines.images(facts)))
    changed = drawn = ""
    if earlier:
        changed = compatibility.changes(asdict(run.config), earlier.content)
        if not (run.config.exact_epochs or run.config.synthetic):
            drawn = f"shards are drawn anew from step {state.step} on (--resampled)"
    # From here on the checkpoint's content is freed.
    log.open(state.step, facts, writes, earlier)
    log.remark(f"settings changed since the checkpoint: {changed}" if changed else "")
    log.remark(drawn)
    if run.config.earlier_attempts and not earlier:
        log.say("no checkpoint from earlier attempts; starting from scratch")
    for remark in (*first_lines.remarks(run), loaded):
        log.remark(remark)


def _restore_cut(run: TrainingRun, counts: object) -> None:
    # Steps are cut as they were before, if that was among as many ranks. A checkpoint may hold
    # anything.
    if run.config.balance != "auto" or not isinstance(counts, list):
        return
    is_cut = all(isinstance(count, int) and count > 0 for count in counts)
    if is_cut and len(counts) == run.ranks.world and sum(counts) == run.data.batch:
        run.data.recut(Cut.into(counts))


def _load_weights(run: TrainingRun) -> str:
    config, state, log = run.config, run.state, run.log
    if not config.weights or run.earlier or config.synthetic:
        return ""
    log.progress.phase(phases.DOWNLOAD)
    path = downloaded_weights(config.weights, config.model, run.ranks)
    log.progress.phase(phases.START)
    line = load_weights(state.model, path, run.data.classes, run.preparation)
    state.start_average()
    return line
