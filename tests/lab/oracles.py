"""What must hold after every command and run: one line, whole files, clean hosts, exact epochs."""

import json
import re
import zipfile
from itertools import groupby
from pathlib import Path

import numpy as np

from tests.lab.hosts import Lab, processes_with
from tests.lab.run import Result
from tests.lab.waiting import until

NOTED = {"RACKRUN_NOTE_ROWS": "1"}
"""The environment in which ranks note the rows that they train on."""

PROGRESS = re.compile(
    r": listing the images of "
    r"|^(listed|compared( the ends of)?|converted|indexed|read the names of) [\d,]+ .* [\d,]+/s"
    r"|^[\d,]+ class(es)?: .*; images: |^quality report: [\d,]+ images stored"
)
"""What a command has done until it found the mistake."""

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # beside tab and newline


def one_line(result: Result) -> str:
    """Return the one line that a command printed but for its progress, which says why it ended.

    Indented lines belong to it, such as the two fingerprints of a key that has changed.
    """
    first = [line for line in result.lines if not line.startswith("    ")]
    assert sum(not PROGRESS.search(line) for line in first) == 1, result
    return last_line(result)


def last_line(result: Result) -> str:
    """Return the line that says why a command ended, with its indented ones; nothing follows."""
    assert "Traceback" not in result.said, result
    lines = result.err.splitlines()
    start = max((n for n, line in enumerate(lines) if not line.startswith("    ")), default=0)
    assert "error: " in lines[start], result
    return "\n".join(lines[start:])


def text_only(printed: str) -> None:
    """Check that nothing printed moves a cursor, sets a title, or rings."""
    assert not (found := CONTROL.search(printed)), printed[max(0, found.start() - 50) :][:100]


def whole(folder: Path) -> None:
    """Check that every file of a run folder is whole, and that none is left half written."""
    for path in folder.rglob("*"):
        assert not path.name.endswith(".partial"), f"{path} is left"
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".jsonl":
            assert [json.loads(line) for line in path.read_text().splitlines()], path
        elif path.suffix == ".pt":
            assert zipfile.ZipFile(path).testzip() is None, path


def clean(lab: Lab, seconds: float = 20.0) -> None:
    """Wait until nothing of a run is left on any host: no process, no connection, no folder."""
    until(lambda: not left(lab), f"nothing is left, but there is {left(lab)}", seconds)


def left(lab: Lab) -> list[str]:
    """Return what is left of runs on hosts: command lines, and the folders of agents."""
    lines = [line for host in lab.hosts for line in host.processes().values()]
    found = [line for line in lines if "unshare\0" not in line and "sshd_config" not in line]
    for path in lab.folder.rglob("runs/2*/plan*.json"):
        plan = json.loads(path.read_text())
        found += processes_with(f"RACKRUN_RUN_ID={plan['run_id']}").values()
        found += [host["scratch"] for host in plan["hosts"] if Path(host["scratch"]).exists()]
    return found


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


def exact_epochs(*runs: Path) -> list[list[int]]:
    """Check that each epoch has every row once; one that is not over may lack some.

    The last folder has the settings. Return the numbers of ranks of each epoch, in order.
    """
    facts = json.loads((runs[-1] / "config.json").read_text())["resolved"]
    steps, epoch_steps = trained_rows(*runs), -(-facts["images"] // facts["batch"])
    assert steps and list(steps) == list(range(len(steps))), f"steps that are noted: {[*steps]}"
    worlds = []
    for first in range(0, len(steps), epoch_steps):
        of_epoch = [*steps.values()][first : first + epoch_steps]
        rows = [row for step in of_epoch for of_rank in step for row in of_rank]
        more = np.bincount(rows, minlength=facts["images"]) - 1
        is_over = len(of_epoch) == epoch_steps
        missing, extra = np.flatnonzero(more < 0), np.flatnonzero(more > 0)
        assert not extra.size and not (is_over and missing.size), (first, missing, extra)
        worlds.append([ranks for ranks, _ in groupby(map(len, of_epoch))])
    return worlds
