"""The example for Slurm, on a real one: it trains, goes on after whatever ends it, and converts."""

import hashlib
import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.lab import warm, warm_shell
from tests.lab.clusters import SlurmLab
from tests.lab.hosts import processes_with
from tests.lab.waiting import until

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "slurm.sbatch")
TINY = (
    "--image-size",
    "32",
    "--width",
    "4",
    "--batch-size",
    "4",
    "--device",
    "cpu",
    "--no-tensorboard",
)
EXACT = ("--exact-epochs", *TINY)


@pytest.fixture
def home(tmp_path: Path, drawn: Path) -> Path:
    """Return the folder in which sbatch is typed."""
    (tmp_path / "data").symlink_to(drawn)
    return tmp_path


def train(slurm: SlurmLab, home: Path, *options: str, **variables: str) -> str:
    """Submit the example; the number of the job."""
    task = ("catdog", "--data", "data/shards", *EXACT, *options)
    variables = {"RACKRUN": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return slurm.submit(home, "--cpus-per-task=1", SCRIPT, *task, **variables)


def output(home: Path, job: str) -> str:
    """Return what the job has written so far."""
    file = home / f"slurm-{job}.out"
    return file.read_text() if file.exists() else ""


def runs(home: Path) -> list[Path]:
    """Return the run folders, the oldest first."""
    return sorted((home / "runs").glob("2*"))


def checkpoints(run: Path) -> list[int]:
    """Return the steps at which a run has saved."""
    return sorted(int(path.stem.split("-")[1]) for path in run.glob("checkpoints/step-*.pt"))


def test_a_job_of_two_nodes_trains_to_the_end(slurm, home):
    """One command line: the first node serves the shards, and both end with 0 and a result."""
    python = home / "clone" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    warm_shell.write_client(python, warm.shell(), str(home / "clone"))
    ours = {"RACKRUN": str(home / "clone"), "PYTHONPATH": str(ROOT)}
    job = train(slurm, home, "--epochs", "2", **ours)
    ended = slurm.ended(job)
    log = output(home, job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), log
    (run,) = runs(home)
    assert run.name.endswith(f"-rackrun-{job}")
    results = [
        json.loads((run / name).read_text()) for name in ("result.json", "result-node1.json")
    ]
    assert [result["codes"] for result in results] == [{"0": 0}, {"1": 0}]
    assert all(list(result["hosts"].values()) == ["clean"] for result in results)
    assert json.loads((run / "plan.json").read_text())["world_size"] == 2
    assert "serving" in log and "http://127.0.0.2:" in log
    assert log.count("rackrun: accuracy: ") == log.count("rackrun: run: ") == 1
    assert (run / "final.pt").exists()
    assert {path.name for path in (run / "logs").iterdir()} == {"n1", "n2"}


@pytest.mark.long  # test_node.py: a signal lets all nodes save
def test_a_job_whose_time_is_up_goes_on_later(slurm, home):
    """SIGUSR1: the ranks save, the job ends with 75, is queued again, and resumes at that step.

    They save as well when it is cancelled, and then nothing of it is left.
    """
    canary = str(uuid.uuid4())
    job = train(slurm, home, "--epochs", "5000", "--save-every-epochs", "5000", RUN_CANARY=canary)
    until(lambda: runs(home) and (runs(home)[0] / "metrics.jsonl").exists())
    slurm.run("scancel", "--signal=USR1", job)
    until(lambda: "resumed after step" in output(home, job))
    first, second = runs(home)
    assert slurm.job(job)["Restarts"] == "1"
    assert json.loads((first / "result.json").read_text())["exit_code"] == 75
    assert json.loads((first / "result-node1.json").read_text())["exit_code"] == 75
    saved = checkpoints(first)[-1]
    assert f"resumed after step {saved} of" in output(home, job)
    assert f"--resume runs/{first.name}" in " ".join(plan_of(second)["command"])

    until(lambda: last_step(second) > saved)
    slurm.run("scancel", job)
    assert slurm.ended(job)["JobState"] == "CANCELLED"
    until(lambda: not processes_with(f"RUN_CANARY={canary}"), seconds=30)
    assert json.loads((second / "result.json").read_text())["exit_code"] == 143
    assert checkpoints(second)[-1] > saved


def last_step(run: Path) -> int:
    """Return the step of the last line of a run's metrics."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    step: int = json.loads(lines[-1])["step"] if lines else 0
    return step


def plan_of(run: Path) -> dict[str, Any]:
    """Return the plan of the first node."""
    host: dict[str, Any] = json.loads((run / "plan.json").read_text())["hosts"][0]
    return host


def test_four_tasks_convert_to_the_bytes_of_one(slurm, home, drawn):
    """An array job of four, of which the last task completes the folder, and one conversion."""
    args = ("catdog", "data/train.zip", "shards", "--workers", "1")
    job = slurm.submit(
        home, "--array=0-3", "--nodes=1", "--cpus-per-task=1", SCRIPT, *args, RACKRUN=str(ROOT)
    )
    for task in (f"{job}_{number}" for number in range(4)):
        assert slurm.ended(task)["JobState"] == "COMPLETED", output(home, task)
    assert digests(home / "shards") == digests(drawn / "shards")


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of every file of a folder of shards."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }
