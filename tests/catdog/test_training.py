"""`python -m catdog` as a user types it: codes, lines, signals, and no process left."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from training import checkpoint
from training.folder import RunFolder

ROOT = Path(__file__).parents[2]
TINY = ["--size", "32", "--width", "4", "--batch-size", "8", "--device", "cpu", "--no-tensorboard"]


def environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def catdog(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "catdog", *args],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few drawn cats and dogs as shards."""
    folder = tmp_path_factory.mktemp("demo")
    done = catdog("demo", str(folder), "--pictures", "60", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "shards"


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        ([], 64, "error: no data: type --data FOLDER|URL"),
        (["--epochs", "0"], 64, "error: --epochs 0 is not 1 or more"),
        (["--synthetic", "--model", "resnet5"], 64, "no such model; did you mean resnet50"),
        (["--synthetic", "--resume", "README"], 74, "error: "),
    ],
    ids=["no data", "range", "model", "no checkpoint"],
)
def test_what_cannot_be_is_one_line_and_a_code(
    tmp_path: Path, args: list[str], code: int, sentence: str
) -> None:
    """Where, what, and what to type; no traceback."""
    if "README" in args:
        (tmp_path / "README").write_text("no checkpoint")
    done = catdog(*args, *TINY, cwd=tmp_path)
    assert done.returncode == code
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_damaged_picture_ends_the_run_with_65(shards: Path, tmp_path: Path) -> None:
    """Found in a loader worker, told as one line by the rank."""
    copy = tmp_path / "shards"
    copy.mkdir()
    for file in shards.iterdir():
        data = bytearray(file.read_bytes())
        if "train" in file.name and file.suffix == ".tar":
            data[2000] ^= 0xFF
        (copy / file.name).write_bytes(data)
    done = catdog("--data", str(copy), "--workers", "1", *TINY, cwd=tmp_path)
    assert done.returncode == 65
    assert done.stderr.startswith("error: ")
    assert "catdog-train-0" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_all_processes_ends_with_a_checkpoint(
    shards: Path, tmp_path: Path, number: int, code: int
) -> None:
    """As Ctrl-C on a terminal: loader workers hear it too; the rank still finishes its step.

    Then the run goes on from there to its end.
    """
    args = ["--data", str(shards), "--workers", "1", *TINY]
    long_run = subprocess.Popen(
        [sys.executable, "-m", "catdog", *args, "--epochs", "500"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with long_run, killed_in_the_end(long_run):
        assert long_run.stdout
        assert long_run.stderr
        while "epoch 2/500" not in long_run.stdout.readline():
            assert long_run.poll() is None
        os.killpg(long_run.pid, number)
        threading.Thread(target=long_run.stdout.read).start()  # the rank may still have to say
        complaint = long_run.stderr.read()
        assert long_run.wait() == code
    assert "Traceback" not in complaint
    (run,) = (tmp_path / "runs").iterdir()
    saved = checkpoint.steps_in(RunFolder(run).checkpoints)[-1]
    epochs = checkpoint.read(saved)["state"]["epoch"] + 1
    done = catdog(*args, "--resume", "latest", "--epochs", str(epochs), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"of {saved}" in done.stdout


@contextmanager
def killed_in_the_end(process: "subprocess.Popen[str]") -> Iterator[None]:
    """Leaves no process of a session behind, whatever the test found."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_two_ranks_train_evaluate_and_go_on(shards: Path, tmp_path: Path) -> None:
    """Under torchrun: one folder, every validation picture counted once, no bit lost."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    args = ["-m", "catdog", "--data", str(shards), "--workers", "1", "--ema", "0.9", *TINY]

    def ran(*more: str) -> None:
        done = subprocess.run(
            [sys.executable, *torchrun, *args, "--epochs", "2", *more],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    ran("--run-folder", "whole")
    assert '"samples": 6' in (tmp_path / "whole" / "metrics.jsonl").read_text()
    first = checkpoint.steps_in(tmp_path / "whole" / "checkpoints")[0]
    ran("--run-folder", "went-on", "--resume", str(first))
    first_run, second_run = (
        checkpoint.read(tmp_path / name / "final.pt")["model"] for name in ("whole", "went-on")
    )
    assert all(torch.equal(first_run[name], second_run[name]) for name in first_run)
