"""`./run-local` as it is typed."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.lab import warm
from tests.lab.warm import ROOT


def local(*args: str, cwd: Path = ROOT, **variables: str) -> "subprocess.CompletedProcess[str]":
    return warm.run(
        *("-m", "rackrun", "./run-local", *args),
        start=warm.Launcher,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
    )


def test_a_command_of_ones_own_runs_under_torchrun(tmp_path):
    """Two ranks of `-- python -c …`: output on stdout, our words on stderr, the folder complete."""
    code = "import os; print('rank', os.environ['RANK'], os.environ['FROM_ME'])"
    ended = local(
        *("--python", str(warm.interpreter()), "--nproc", "2", "--env", "FROM_ME=a b"),
        *("--name", "mine", "--", "python", "-c", code),
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["0 | rank 0 a b", "1 | rank 1 a b"]
    (folder,) = (tmp_path / "runs").glob("2*")
    run = json.loads((folder / "plan.json").read_text())["run_id"]
    first = ended.stderr.splitlines()[0]
    assert first.startswith("rackrun: 2 ranks on 1 host")
    assert first.endswith(f"; run {run[:8]}, runs/{folder.name}")
    assert folder.name.endswith("-mine")
    assert {"plan.json", "result.json", "usage.jsonl", "logs"} <= {
        path.name for path in folder.iterdir()
    }
    assert json.loads((folder / "result.json").read_text())["codes"] == {"0": 0, "1": 0}
    use = json.loads((folder / "usage.jsonl").read_text().splitlines()[0])
    assert (use["host"], use["memory"] > 1e6) == ("localhost", True)


def test_a_dry_run_is_what_runs(tmp_path):
    """Text and JSON of --dry-run name what a real run then writes as its plan; nothing is made."""
    python = ("--python", str(warm.interpreter()))
    args = (*python, "--nproc", "2", "--env", "A='x y'", "--", "python", "-c", "print('$HOME')")
    dry = json.loads(local("--dry-run", "--json", *args, cwd=tmp_path).stdout)
    assert not (tmp_path / "runs").exists()
    text = local("--dry-run", *args, cwd=tmp_path).stdout
    assert "torchrun: " in text
    assert "print('\"'\"'$HOME'\"'\"')" in text
    assert local(*args, cwd=tmp_path).returncode == 0
    (folder,) = (tmp_path / "runs").glob("2*")
    real = json.loads((folder / "plan.json").read_text())

    def port(plan: dict) -> str:
        return next(name for name in plan["hosts"][0]["torchrun"] if "master-port" in name)

    aligned = json.dumps(dry).replace(dry["run_id"], real["run_id"]).replace(port(dry), port(real))
    aligned = aligned.replace(Path(dry["hosts"][0]["folder"]).name, folder.name)
    assert json.loads(aligned) == real


@pytest.mark.parametrize("args", [("--help",), ("catdog", "--help")])
def test_help_imports_no_torch(args):
    """Help of the launcher and of a task starts without what only ranks need."""
    ended = local(*args, PYTHONPROFILEIMPORTTIME="1")
    assert ended.returncode == 0
    assert "usage: " in ended.stdout
    assert " torch\n" not in ended.stderr


def test_ctrl_c_while_the_demo_is_drawn_is_reported_once(tmp_path):
    """One line and 130, whether the terminal or a program sends it; nothing goes on."""
    process = warm.Launcher(
        *("-m", "rackrun", "./run-local"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout and "drawing" in process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert not list((tmp_path / "data/demo").glob("*.zip"))
