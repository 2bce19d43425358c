"""The last part before the first step: a checkpoint or weights, the run folder, first lines."""

import json
import os
from dataclasses import asdict
from typing import Any

from rackrun.atomic import write_whole
from rackrun.contract import phases, variables
from rackrun.training import first_lines
from rackrun.training.data.order import Cut
from rackrun.training.models.published import downloaded_weights
from rackrun.training.models.weights import load_weights
from rackrun.training.run import compatibility
from rackrun.training.run.folder import own_folder, run_name, writes_to
from rackrun.training.setup import TrainingRun
from rackrun.training.track.tracker import check_trackers


def begin(run: TrainingRun) -> None:
    """Load the checkpoint or the weights of a run, open its folder, print its first lines."""
    state, log, earlier, checkpoints = run.state, run.log, run.earlier, run.checkpoints
    log.phase(phases.START)
    if earlier:
        state.load_state_dict(earlier.content["state"])
        run.ranks.restore_statistics(state.model, earlier.content.get("statistics"))
        _restore_cut(run, earlier.content.get("images_by_rank"))
    # Before the folder: a file that does not fit ends the run while nothing is written.
    loaded = _load_weights(run)
    if run.ranks.first:
        check_trackers(run.config.trackers)
    log.folder = own_folder(run.task.name, run.config.run_folder, run.ranks)
    writes = writes_to(log.folder, run.ranks)
    facts = first_lines.facts_of(run)
    for line in first_lines.lines_of(run, facts):
        log.say(line)
    if run.ranks.first:
        log.report(dataset=", ".join(first_lines.images(facts)))
    if writes:
        checkpoints.open(run.config.keep_checkpoints)
    log.open(state, _written_settings(run, facts), earlier.folder if earlier else None)
    if earlier:
        log.say(f"resumed after step {state.step} of {earlier.path}")
        changed = compatibility.changes(asdict(run.config), earlier.content)
        log.say(f"settings changed since the checkpoint: {changed}" if changed else "")
        if not (run.config.exact_epochs or run.config.synthetic):
            log.say(f"shards are drawn anew from step {state.step} on (--resampled)")
        checkpoints.take_over(state.step, earlier)
    elif run.config.earlier_attempts:
        log.say("no checkpoint from earlier attempts; starting from scratch")
    for remark in (*first_lines.remarks(run), loaded):
        log.say(remark)


def _written_settings(run: TrainingRun, facts: first_lines.Facts) -> dict[str, Any]:
    # Writes config.json, on the first rank; returns what trackers get.
    settings = {
        "task": run.task.name,
        "name": run_name(run.task.name),
        **asdict(run.config),
        "data_sha256": run.data.digest,
        "data_versions": run.data.versions,
        "resolved": facts,
    }
    if run.ranks.first:
        text = json.dumps(settings, indent=2, allow_nan=False) + "\n"
        write_whole(run.log.folder.config, text.encode())
    run_id = os.environ.get(variables.RUN_ID, "")
    return {**settings, "run_id": run_id, "git_commit": facts["git_commit"]}


def _restore_cut(run: TrainingRun, counts: object) -> None:
    # Steps are cut as they were before, if that was among as many ranks. A checkpoint may hold
    # anything.
    if run.config.balance != "auto" or not isinstance(counts, list):
        return
    is_cut = all(isinstance(count, int) and count > 0 for count in counts)
    if is_cut and len(counts) == run.ranks.world and sum(counts) == run.data.steps.batch:
        run.data.steps.recut(Cut.into(counts))


def _load_weights(run: TrainingRun) -> str:
    config, state, log = run.config, run.state, run.log
    if not config.weights or run.earlier or config.synthetic:
        return ""
    log.phase(phases.DOWNLOAD)
    path = downloaded_weights(config.weights, config.model, run.ranks)
    log.phase(phases.START)
    line = load_weights(state.model, path, run.data.classes, run.preparation)
    state.start_average()
    return line
