"""The rows that each rank of a run trained on, as ranks noted them, held against the data set."""

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rackrun.contract.variables import NOTE_ROWS
from rackrun.run_folder import RunFolder

NOTED = {NOTE_ROWS: "1"}
"""The environment in which ranks note them."""

Times = npt.NDArray[np.intp]  # how often each row comes


def trained_rows(*runs: Path) -> dict[int, list[list[int]]]:
    """Return the rows of each rank by step, of a run in one folder or in several.

    Of a step that was trained again, because its result was lost, the last time counts.
    """
    lines = [
        json.loads(line)
        for run in runs
        for path in run.glob("rows/rank-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    lines.sort(key=lambda line: float(line["time"]))
    newest = {(line["step"], line["world"], line["rank"]): line["rows"] for line in lines}
    worlds = {line["step"]: line["world"] for line in lines}
    return {
        step: [newest[step, world, rank] for rank in range(world)]  # KeyError: a rank lacks it
        for step, world in sorted(worlds.items())
    }


def exact_epochs(*runs: Path, due: Mapping[int, Times] | None = None) -> list[list[int]]:
    """Check that each epoch has every row once, or as often as it is `due` by epoch.

    The last folder has the settings. Return the numbers of ranks of each epoch, in order. An epoch
    that is not over may have no row too often.
    """
    facts = json.loads(RunFolder(runs[-1]).config.read_text())["resolved"]
    once, steps = np.ones(facts["images"], np.intp), trained_rows(*runs)
    due = due or {}
    epoch_steps = -(-int(due.get(0, once).sum()) // facts["batch"])
    assert steps and list(steps) == list(range(len(steps))), f"steps that are noted: {[*steps]}"
    worlds = []
    for first in range(0, len(steps), epoch_steps):
        of_epoch = [*steps.values()][first : first + epoch_steps]
        rows = [row for step in of_epoch for of_rank in step for row in of_rank]
        more = np.bincount(rows, minlength=once.size) - due.get(first // epoch_steps, once)
        is_over = len(of_epoch) == epoch_steps
        missing, extra = np.flatnonzero(more < 0), np.flatnonzero(more > 0)
        assert not extra.size and not (is_over and missing.size), (first, missing, extra)
        worlds.append([ranks for ranks, _ in groupby(map(len, of_epoch))])
    return worlds
