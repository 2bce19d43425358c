"""Every decoder under a coverage-guided fuzzer: `python -m tests.fuzz.fuzz` does the same."""

import subprocess
import sys

import pytest

from tests.fuzz.fuzz import ROOT


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
@pytest.mark.security("FUZZ-1")
def test_ten_million_inputs_break_no_decoder():
    """No traceback, no input of more than ten seconds, none of more than 4 GiB."""
    args = [sys.executable, "-m", "tests.fuzz.fuzz", "--inputs", "10000000"]
    done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
