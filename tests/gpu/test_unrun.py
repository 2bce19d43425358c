"""What becomes of the tests of a GPU on a machine without one."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("user", [{}, {"RUN_TESTS_COMPLETE": "1"}], ids=["user", "root or CI"])
def test_tests_of_a_gpu_are_said_to_be_unrun_where_there_is_none(user, tmp_path):
    line = tmp_path / "line"
    here = str(Path(__file__).parent)
    chosen = [sys.executable, "-m", "pytest", "-q", "-p", "tests.summary", "-m", "gpu", here]
    done = subprocess.run(
        [*chosen, "--basetemp", str(tmp_path / "basetemp"), "-p", "no:cacheprovider"],
        cwd=Path(__file__).parents[2],
        env={"HOME": str(tmp_path), "PATH": "", "RUN_TESTS_LEFT_OUT": str(line), **user},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "9 skipped" in done.stdout, done.stdout + done.stderr
    assert line.read_text() == "run-tests: unrun: 9 tests of a GPU (no GPU here)\n"
