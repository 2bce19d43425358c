"""A script of one's own that reports has what tasks have."""

import json
import os
import re
import sys
from pathlib import Path

from tests import warm
from tests.launcher.drive import ROOT, Drive

PAGE = ROOT / "docs" / "howto" / "own-script.md"
STUCK = """
import os, time
from rackrun import report
last = 3 if os.environ["RANK"] == "1" else 5
for step in range(1, last + 1):
    report(step=step)
    time.sleep(0.25)  # so that each step is sent
time.sleep(999)
"""


def test_the_script_of_the_page_runs_as_it_is_printed(tmp_path: Path) -> None:
    """Two ranks under torchrun; the result has the last values of rank 0."""
    (script,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "script.py").write_text(script)
    ended = warm.run(
        *("-m", "launcher", "local", "--nproc", "2", "--", "python", "script.py"),
        start=warm.Launcher,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stderr
    (result,) = (tmp_path / "runs").glob("2*/result.json")
    assert json.loads(result.read_text())["report"] == {
        "step": 30, "loss": 1 / 30, "accuracy": 0.9
    }  # fmt: skip


def test_a_script_that_hangs_is_named_with_its_step(tmp_path: Path) -> None:
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
