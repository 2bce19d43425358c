"""Run folders are their owner's alone, here and on hosts, and nothing else of a run stays."""

import subprocess
import sys
from pathlib import Path

from tests.lab.run import run

WRITES = "import os; open(os.environ['RACKRUN_RUN_FOLDER'] + '/final.pt', 'w').write('x')"


def readable(folder: Path) -> list[str]:
    """Return the files of a folder that another account of this machine can read."""
    program = (
        "import os, pathlib, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "for path in pathlib.Path(sys.argv[1]).rglob('*'):\n"
        "    if path.is_file() and os.access(path, os.R_OK): print(path.name)\n"
    )
    output = subprocess.run(
        [sys.executable, "-S", "-c", program, str(folder)], capture_output=True, text=True
    )
    return sorted(output.stdout.split())


def test_runs_are_private_unless_shared(passable):
    """Logs, weights, metrics are private on both sides; --share opens all but the plan."""
    lab, local_folder = passable.ready(1), passable.folder / "here"
    for folder in (local_folder, lab.folder / "there"):
        folder.mkdir()
    rank = ["--env", "KEY=hunter2", "--", "python", "-c", WRITES]
    assert run(["./run-local", *rank], local_folder).code == 0
    hosts = str(lab.write_hosts(f"python={lab.cheap_python()} workdir={lab.folder}/there"))
    args = (hosts, "--", sys.executable, "-c", WRITES)
    assert lab.result_of("--env", "KEY=hunter2", *args)[0] == 0
    folders = (local_folder / "runs", lab.folder / "runs", lab.folder / "there" / "runs")
    for runs in folders:
        assert readable(runs) == []
        assert [oct(run.stat().st_mode & 0o777) for run in runs.glob("2*")] == ["0o700"]
    assert run(["./run-local", "--share", *rank], local_folder).code == 0
    assert lab.result_of("--share", *args)[0] == 0
    for runs in folders:
        assert "final.pt" in readable(runs)
        assert "plan.json" not in readable(runs)
    for plan in (local_folder / "runs").glob("2*/plan.json"):
        assert "hunter2" in plan.read_text()
        assert plan.stat().st_mode & 0o777 == 0o600


def test_torchrun_leaves_nothing_in_the_folder_for_temporary_files(tmp_path):
    """Its files for errors of ranks go with the agent's own; good runs and bad ones."""
    remote = tmp_path / "tmp"
    remote.mkdir()
    ended = run("./run-local --nproc 2 -- true", tmp_path, env={"TMPDIR": str(remote)})
    assert ended.code == 0, ended
    assert [path.name for path in remote.rglob("*")] == []
