"""The set-up of a run, from top to bottom: all that comes before its first step.

started   joins the other ranks, sets up the device, opens the data: TrainingRun
begin     loads a checkpoint or weights, opens the run folder, prints the first lines
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rackrun.atomic import write_whole
from rackrun.contract import phases, variables
from rackrun.reports import rank_number, send
from rackrun.training import first_lines
from rackrun.training.balance import Balance, why_even
from rackrun.training.conditions import without_evaluation
from rackrun.training.config import Config
from rackrun.training.data.open import open_data
from rackrun.training.data.order import Cut
from rackrun.training.device import set_up
from rackrun.training.models.published import downloaded_weights
from rackrun.training.models.weights import load_weights
from rackrun.training.run import compatibility
from rackrun.training.run.data_version import pinned
from rackrun.training.run.folder import own_folder, run_name, writes_to
from rackrun.training.run.resume import earlier_run
from rackrun.training.stop_requests import StopRequests
from rackrun.training.task import Task
from rackrun.training.track.tracker import check_trackers
from rackrun.training.training_run import TrainingRun
from rackrun.training.world import joined


@contextmanager
def started(task: Task, config: Config) -> Iterator[TrainingRun]:
    """Join the world that torchrun describes as one of its ranks; yield the run."""
    # From now on hangs are detected, even before ranks join.
    send({"rank": rank_number(), "phase": phases.START})
    with joined(config) as ranks, StopRequests(config.save_minutes) as requests:
        compute = set_up(config, ranks)
        earlier = earlier_run(config, task.name, ranks)  # of any host, sent to all
        config = earlier.resolved(config) if earlier else task.resolve(config)
        # Before the data are opened: ranks must read one version, though an append ends meanwhile.
        located, remarks = pinned(config, earlier, ranks)
        transforms = [task.transforms(config, epoch) for epoch in range(config.epochs)]
        data = open_data(located, ranks, transforms, task.name, task.synthetic_classes)
        if not data.has_evaluation:
            config = without_evaluation(config)
        yield TrainingRun(task, config, ranks, requests, compute, data, earlier, remarks)


def begin(run: TrainingRun) -> None:
    """Load the checkpoint or the weights of a run, open its folder, print its first lines."""
    config, state, log, earlier = run.config, run.state, run.log, run.earlier
    log.phase(phases.START)
    if earlier:
        state.load_state_dict(earlier.content["state"])
        run.ranks.restore_statistics(state.model, earlier.content.get("statistics"))
        _restore_cut(run, earlier.content.get("images_by_rank"))
    # Before the folder: a file that does not fit ends the run while nothing is written.
    loaded = _load_weights(run)
    if run.ranks.first:
        check_trackers(config.trackers)
    log.folder = own_folder(run.task.name, config.run_folder, run.ranks)
    writes = writes_to(log.folder, run.ranks)
    facts = first_lines.facts_of(run)
    for line in first_lines.lines_of(run, facts):
        log.say(line)
    if run.ranks.first:
        log.report(dataset=", ".join(first_lines.images(facts)))
    if writes:
        run.checkpoints.open(config.keep_checkpoints)
    log.open(state, _written_settings(run, facts), earlier.folder if earlier else None)
    if earlier:
        log.say(f"resumed after step {state.step} of {earlier.path}")
        changed = compatibility.changes(asdict(config), earlier.content)
        log.say(f"settings changed since the checkpoint: {changed}" if changed else "")
        if not (config.exact_epochs or config.synthetic):
            log.say(f"shards are drawn anew from step {state.step} on (--resampled)")
        run.checkpoints.take_over(state.step, earlier)
    elif config.earlier_attempts:
        log.say("no checkpoint from earlier attempts; starting from scratch")
    for remark in (*first_lines.remarks(run), loaded):
        log.say(remark)
    _begin_balance(run)


def _restore_cut(run: TrainingRun, counts: object) -> None:
    # Steps are cut as they were before, if that was among as many ranks. A checkpoint may hold
    # anything.
    if run.config.balance != "auto" or not isinstance(counts, list):
        return
    is_cut = all(isinstance(count, int) and count > 0 for count in counts)
    if is_cut and len(counts) == run.ranks.world and sum(counts) == run.steps.batch:
        run.steps.recut(Cut.into(counts))


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


def _begin_balance(run: TrainingRun) -> None:
    # Where only an even cut is possible, a line says why, unless this rank is alone.
    if run.config.balance != "auto" or run.ranks.world == 1:
        return
    if why := why_even(run.state.model, run.steps.batch, run.ranks.world):
        run.log.say(f"--balance auto: steps are split evenly, since {why}")
        return
    run.balance = Balance(run.steps)
    run.checkpoints.images_by_rank = run.balance.counts
    run.log.shares(run.state.step, run.balance.counts)
