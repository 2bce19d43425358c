"""A script of one's own that reports has what tasks have."""

import json
import os
import re
import sys

import pytest

from rackrun.launcher.run.stragglers import straggler
from tests.lab import warm
from tests.launcher.drive import ROOT, Drive

PAGE = ROOT / "docs" / "guides" / "own-script.md"
STUCK = """
import os, time
from rackrun import report
last = 3 if os.environ["RANK"] == "1" else 5
for step in range(1, last + 1):
    report(step=step)
    time.sleep(0.25)  # so that each step is sent
time.sleep(999)
"""


def test_the_script_of_the_page_runs_as_it_is_printed(tmp_path):
    """Two ranks under torchrun; the result has the last values of rank 0."""
    script, *_ = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "script.py").write_text(script)
    ended = warm.run(
        *("-m", "rackrun", "./run-local", "--python", str(warm.interpreter()), "--nproc", "2"),
        *("--", "python", "script.py"),
        start=warm.Launcher,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stderr
    (result,) = (tmp_path / "runs").glob("2*/result.json")
    assert json.loads(result.read_text())["report"] == {
        "step": 30, "loss": 1 / 30, "accuracy": 0.9
    }  # fmt: skip


def test_a_script_that_hangs_is_named_with_its_step(tmp_path):
    """Rank 1 stops after 3 steps, rank 0 after 5: rank 1 is the one, with 75."""
    drive = Drive(
        tmp_path,
        [sys.executable, "-c", STUCK],
        slots=[2],
        environment=[("PYTHONPATH", str(ROOT))],
        limits={"hang_seconds": 3.0},
    )
    assert drive.wait() == 75
    assert drive.result["rank"] == 1
    assert re.match(r"no progress for \d+ s at step 3", drive.result["cause"])
    assert not drive.alive()


LATE = """
import os, time
import rackrun.reports
from rackrun import report
rackrun.reports.SECONDS_BETWEEN_REPORTS = 0
late = os.environ["RANK"] == "1"
for step in range(1, 201):
    report(step=step, data_seconds=0.03 if late else 0.002, compute_seconds=0.07)
    time.sleep(0.005)
"""


def test_a_script_that_reports_its_own_seconds_has_its_straggler_named(tmp_path):
    """Rank 1 reads slowly: one line names it, its host and why, while the script runs."""
    environment = [("PYTHONPATH", str(ROOT))]
    drive = Drive(tmp_path, [sys.executable, "-c", LATE], slots=[1, 1], environment=environment)
    assert drive.wait() == 0, drive.err
    (line,) = (line for line in drive.err.splitlines() if "is slow" in line)
    assert line == (
        "rackrun: 127.0.0.3 is slow: last 50 steps: the others wait for rank 1 on 127.0.0.3"
        " 28.0 of 100.0 ms a step: its data takes 30.0 ms, theirs 2.0 ms"
    )


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ((0.02, 0.12), "compute"),
        ((0.05, 0.1), "data"),
        ((0.02, 0.1), ""),  # as the others
        ((0.03, 0.1), ""),  # a tenth later, which is not worth a line
        ((0.0, 0.01), ""),  # sooner: no rank waits for it
    ],
)
def test_who_is_late_by_more_than_a_tenth_is_named_with_the_part(second, why):
    """Medians count: a single step of a second names no rank."""
    once = [(1.0, 0.1)] + [(0.02, 0.1)] * 10
    result = straggler({0: once, 1: [second] * 11, 2: once}, dict.fromkeys(range(3), "gpu01"))
    assert (result.rank, result.why) == (1, why) if result else not why
