"""The commands of `python -m rackrun.convert`: each is imported only when it is called."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


SCRIPTS = {
    "catdog": "catdog",
    "folder": "folder",
    "hf": "hf",
    "imagenet": "imagenet",
    "mnist": "mnist",
    "summary": "summary",
    "table": "csv",
    "verify": "verify",
}


@pytest.mark.parametrize("script", ["table", "verify"])  # one with an OUT, one without
def test_a_file_is_a_script(script, tmp_path):
    """`convert/table.py` is the command, and fails like it."""
    as_script = [str(ROOT / "convert" / f"{script}.py")]
    folders = [str(tmp_path / "none"), str(tmp_path / "out")]
    folders = folders[: 1 if script == "verify" else 2]
    done, expected = (
        subprocess.run([sys.executable, *args, *folders], cwd=ROOT, capture_output=True, text=True)
        for args in (as_script, ["-m", "rackrun.convert", SCRIPTS[script]])
    )
    assert done.returncode == expected.returncode != 0
    assert done.stderr == expected.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_with_a_python_that_has_nothing(script, tmp_path):
    """`python3 convert/imagenet.py` in a new clone is `./run-local convert imagenet`."""
    (tmp_path / "convert").mkdir()
    for name in ("rackrun.py", f"{script}.py"):
        shutil.copy(ROOT / "convert" / name, tmp_path / "convert")
    door = tmp_path / "run-local"
    door.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    door.chmod(0o755)
    bare = [sys._base_executable, "-S", f"convert/{script}.py", "my images", "out"]
    done = subprocess.run(bare, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"convert|{SCRIPTS[script]}|my images|out|", "")
