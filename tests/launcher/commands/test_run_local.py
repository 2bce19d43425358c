"""`./run-local` as it is typed."""

import json
import os
import signal
import subprocess
from pathlib import Path

from rackrun.commands import _Caller
from rackrun.launcher.lifecycle import data_preparation
from tests.lab import warm
from tests.lab.run import run
from tests.lab.warm import ROOT


def test_a_command_of_ones_own_runs_under_torchrun(tmp_path):
    """Two ranks of `-- python -c …`: output on stdout, our words on stderr, the folder complete."""
    code = "import os; print('rank', os.environ['RANK'], os.environ['FROM_ME'])"
    options = ["--nproc", "2", "--env", "FROM_ME=a b", "--name", "mine"]
    ended = run(["./run-local", *options, "--", "python", "-c", code], tmp_path)
    assert ended.code == 0, ended
    assert sorted(ended.out.splitlines()) == ["0 | rank 0 a b", "1 | rank 1 a b"]
    (folder,) = (tmp_path / "runs").glob("2*")
    run_id = json.loads((folder / "plan.json").read_text())["run_id"]
    first = ended.err.splitlines()[0]
    assert first.startswith("rackrun: 2 ranks on 1 host")
    assert first.endswith(f"; run {run_id[:8]}, runs/{folder.name}")
    assert folder.name.endswith("-mine")
    assert {"plan.json", "result.json", "usage.jsonl", "logs"} <= {
        path.name for path in folder.iterdir()
    }
    assert json.loads((folder / "result.json").read_text())["codes"] == {"0": 0, "1": 0}
    use = json.loads((folder / "usage.jsonl").read_text().splitlines()[0])
    assert (use["host"], use["memory"] > 1e6) == ("localhost", True)


def test_a_dry_run_is_what_runs(tmp_path):
    """Text and JSON of --dry-run name what a real run then writes as its plan; nothing is made."""
    args = ["--nproc", "2", "--env", "A='x y'", "--", "python", "-c", "print('$HOME')"]
    dry = json.loads(run(["./run-local", "--dry-run", "--json", *args], tmp_path).out)
    assert not (tmp_path / "runs").exists()
    text = run(["./run-local", "--dry-run", *args], tmp_path).out
    assert "torchrun: " in text
    assert "print('\"'\"'$HOME'\"'\"')" in text
    assert run(["./run-local", *args], tmp_path).code == 0
    (folder,) = (tmp_path / "runs").glob("2*")
    real = json.loads((folder / "plan.json").read_text())

    def port(plan: dict) -> str:
        return next(name for name in plan["hosts"][0]["torchrun"] if "master-port" in name)

    aligned = json.dumps(dry).replace(dry["run_id"], real["run_id"]).replace(port(dry), port(real))
    aligned = aligned.replace(Path(dry["hosts"][0]["folder"]).name, folder.name)
    assert json.loads(aligned) == real


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


def test_a_conversion_of_a_launch_calls_commands_as_they_were_typed(monkeypatch, capfd):
    """So that `rackrun local --data images` does not name ./run-local."""
    calls = ["-c", "from rackrun.commands import called; print(called('local'))"]
    data_preparation._run(calls)
    monkeypatch.setattr(_Caller, "by_name", True)
    data_preparation._run(calls)
    assert capfd.readouterr().out == "./run-local\nrackrun local\n"
