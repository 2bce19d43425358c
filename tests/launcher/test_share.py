"""Run folders are their owner's alone, here and on hosts, and nothing else of a run stays."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.lab import ROOT, Lab

Labs = Callable[[int], Lab]
SOMEBODY = 65534
WRITES = "import os; open(os.environ['RACKRUN_RUN_FOLDER'] + '/final.pt', 'w').write('x')"


def local(*words: str, cwd: Path, **environment: str) -> str:
    """`./run-local`, which must end well; what it said."""
    command = [sys.executable, "-m", "launcher", "local", *words]
    more = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, cwd=cwd, env=more, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def readable(folder: Path) -> list[str]:
    """What another account of this machine can read of a folder."""
    program = (
        "import os, pathlib, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "for path in pathlib.Path(sys.argv[1]).rglob('*'):\n"
        "    if path.is_file() and os.access(path, os.R_OK): print(path.name)\n"
    )
    told = subprocess.run(
        [sys.executable, "-S", "-c", program, str(folder)], capture_output=True, text=True
    )
    return sorted(told.stdout.split())


@pytest.fixture
def passable(tmp_path: Path) -> Path:
    """A folder that other accounts can get to."""
    assert os.geteuid() == 0, "accounts need root; type: sudo ./run-tests"
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and folder.is_relative_to("/tmp") and folder != Path("/tmp"):
            folder.chmod(0o755)
    return tmp_path


def test_only_who_is_told_to_shares_its_runs(passable: Path, lab: Labs) -> None:
    """Logs, weights, metrics: nobody else's, on either side; --share opens all but the plan."""
    one = lab(1)
    for folder in (one.folder, one.folder / "there"):
        folder.mkdir(exist_ok=True)
    local("--env", "KEY=hunter2", "--", "python", "-c", WRITES, cwd=passable)
    hosts = str(one.write_hosts(f"python={one.cheap_python()} workdir={one.folder}/there"))
    words = (hosts, "--", sys.executable, "-c", WRITES)
    assert one.said("--env", "KEY=hunter2", *words)[0] == 0
    places = (passable / "runs", one.folder / "runs", one.folder / "there" / "runs")
    for runs in places:
        assert readable(runs) == []
        assert [oct(run.stat().st_mode & 0o777) for run in runs.iterdir()] == ["0o700"]
    local("--share", "--env", "KEY=hunter2", "--", "python", "-c", WRITES, cwd=passable)
    assert one.said("--share", *words)[0] == 0
    for runs in places:
        assert "final.pt" in readable(runs)
        assert "plan.json" not in readable(runs)
    for plan in (passable / "runs").glob("*/plan.json"):
        assert "hunter2" in plan.read_text()
        assert plan.stat().st_mode & 0o777 == 0o600


def test_torchrun_leaves_nothing_in_the_folder_for_temporary_files(tmp_path: Path) -> None:
    """Its files for errors of ranks go with the agent's own; good runs and bad ones."""
    there = tmp_path / "tmp"
    there.mkdir()
    local("--nproc", "2", "--", "true", cwd=tmp_path, TMPDIR=str(there))
    assert [path.name for path in there.rglob("*")] == []
