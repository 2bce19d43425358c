"""Checkpoints: whole or absent, verified, of this run, and never code."""

import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from rackrun.errors import SaveError, UsageError
from training.config import Config, as_plain
from training.run import checkpoint, resume
from training.run.folder import RunFiles


@pytest.fixture
def folder(tmp_path: Path) -> RunFiles:
    folder = RunFiles(tmp_path / "20260101-000000-catdog")
    folder.make()
    return folder


def content(step: int) -> checkpoint.Content:
    return {"state": {"step": step, "weight": torch.full((100,), float(step))}}


def test_what_was_written_is_read(folder: RunFiles) -> None:
    """Tensors and plain data come back as they were."""
    checkpoint.write(folder.final, {"a": torch.arange(5), "b": {"c": [1, "two", None]}})
    found = checkpoint.read(folder.final)
    assert torch.equal(found["a"], torch.arange(5))
    assert found["b"] == {"c": [1, "two", None]}
    assert torch.load(folder.final, weights_only=True)["b"] == {"c": [1, "two", None]}


def test_ckpt_2_every_flipped_byte_is_found(folder: RunFiles) -> None:
    """One flipped byte anywhere makes a file damaged; torch alone would load most of them."""
    checkpoint.write(folder.final, content(3))
    good = folder.final.read_bytes()
    for place in range(0, len(good), 7):
        folder.final.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(SaveError, match=r"final\.pt: (damaged|cut short)"):
            checkpoint.read(folder.final)


@pytest.mark.parametrize("length", [0, 1, 71, 500, -1])
def test_a_truncated_file_is_found(folder: RunFiles, length: int) -> None:
    """A file that was cut, even to nothing, is never taken for a checkpoint."""
    checkpoint.write(folder.final, content(3))
    folder.final.write_bytes(folder.final.read_bytes()[:length])
    with pytest.raises(SaveError, match="cut short"):
        checkpoint.read(folder.final)


def test_ckpt_1_code_in_a_file_is_refused(folder: RunFiles, tmp_path: Path) -> None:
    """A file that would run something when it is unpickled does not get to."""
    canary = tmp_path / "canary"

    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {canary}",)

    for data in (checkpoint.pack({"state": Hostile()}), pickle.dumps(Hostile(), protocol=2)):
        with pytest.raises(SaveError, match="not a file of weights"):
            checkpoint.parse(data, folder.final)
    assert not canary.exists()


def test_the_last_ones_and_the_best_are_kept(folder: RunFiles) -> None:
    """Old checkpoints go, the best one stays under a name of its own."""
    for step in range(1, 7):
        checkpoint.save(folder, content(step), keep=2, best=step == 3)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == [
        "best.pt",
        "step-00000005.pt",
        "step-00000006.pt",
    ]
    assert checkpoint.read(folder.best)["state"]["step"] == 3


def test_the_newest_whole_one_is_taken_and_the_others_are_named(
    folder: RunFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damage costs an interval, not the run, and a line says so."""
    for step in (1, 2, 3, 4):
        checkpoint.save(folder, content(step), keep=9, best=False)
    folder.checkpoint(4).write_bytes(b"")
    damaged = bytearray(folder.checkpoint(3).read_bytes())
    damaged[200] ^= 0x10
    folder.checkpoint(3).write_bytes(damaged)
    path, _ = resume.wanted(str(folder.path), "catdog")
    assert path == folder.checkpoint(2)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "step-00000004.pt: cut short" in said[0]
    assert "step-00000003.pt: damaged" in said[1]


def test_when_none_is_whole_nothing_starts(folder: RunFiles) -> None:
    """A run never begins again from scratch because its checkpoints are damaged."""
    checkpoint.save(folder, content(1), keep=2, best=False)
    folder.checkpoint(1).write_bytes(b"x" * 1000)
    with pytest.raises(SaveError, match="no checkpoint in it is whole; leave out --resume"):
        resume.wanted(str(folder.path), "catdog")


def test_latest_is_the_newest_run_of_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`latest` is this task's newest run with a checkpoint; where there is none, a line says so."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no run of catdog"):
        resume.wanted("latest", "catdog")
    for name in ("20260101-000000-catdog", "20260102-000000-catdog", "20260103-000000-mnist"):
        folder = RunFiles(Path("runs") / name)
        folder.make()
        checkpoint.save(folder, content(1), keep=2, best=False)
    RunFiles(Path("runs/20260104-000000-catdog")).make()  # ended before its first checkpoint
    path, _ = resume.wanted("latest", "catdog")
    assert path == Path("runs/20260102-000000-catdog/checkpoints/step-00000001.pt")
    with pytest.raises(UsageError, match="has no checkpoint"):
        resume.wanted("runs/20260104-000000-catdog", "catdog")


def identity(model: nn.Module, data: str = "d", **settings: int) -> checkpoint.Content:
    config = Config(**{"epochs": 2, **settings})  # type: ignore[arg-type]
    described = {"task": "catdog", "config": as_plain(config)}
    return checkpoint.identity(described, model, data, config.batch_size, 5)


def test_ckpt_3_a_checkpoint_of_another_run_is_refused_with_every_difference() -> None:
    """Other shapes, other data, another seed or batch: each is named, nothing is loaded."""
    small, large = nn.Linear(2, 3), nn.Linear(2, 4)
    with pytest.raises(SaveError) as caught:
        checkpoint.check(
            identity(small, seed=1, batch_size=8),
            {"identity": identity(large, data="e", seed=2, batch_size=16)},
            Path("step.pt"),
        )
    for words in (
        "data is e there and d here",
        "seed is 2 there and 1 here",
        "global batch is 16 there and 8 here",
        "weight is float32 (4, 2) there and float32 (3, 2) here",
    ):
        assert words in str(caught.value)
    with pytest.raises(SaveError, match="type --weights final.pt"):
        checkpoint.check(identity(small), {"model": {}}, Path("final.pt"))


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """What does not fit is no file at all, the last checkpoint stays, and the code is 74."""
    program = (
        "import resource, sys, torch\n"
        "from pathlib import Path\n"
        "from rackrun.commandline import run\n"
        "from training.run import checkpoint\n"
        "from training.run.folder import RunFiles\n"
        "def main(args):\n"
        "    folder = RunFiles(Path(args[0]))\n"
        "    folder.make()\n"
        "    for step, size in ((1, 10), (2, 1_000_000)):\n"
        "        state = {'step': step, 'weight': torch.zeros(size)}\n"
        "        checkpoint.save(folder, {'state': state}, keep=1, best=False)\n"
        "run(main)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
    )
    assert done.returncode == 74
    assert "step-00000002.pt: cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    folder = RunFiles(tmp_path)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-00000001.pt"]
    assert checkpoint.read(folder.checkpoint(1))["state"]["step"] == 1


def test_a_kill_at_any_moment_leaves_whole_checkpoints_only(folder: RunFiles) -> None:
    """After kill -9 in the middle of saving, every file under a final name is whole."""
    checkpoint.save(folder, content(1), keep=3, best=True)
    for delay_ms in (1, 3, 7, 15, 25):
        child = os.fork()
        if child == 0:
            try:
                for step in range(2, 100_000):
                    checkpoint.save(folder, content(step), keep=3, best=True)
            finally:
                os._exit(1)
        time.sleep(delay_ms / 1000)  # any moment will do
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for path in (*checkpoint.steps_in(folder.checkpoints), folder.best):
            checkpoint.read(path)
        assert checkpoint.steps_in(folder.checkpoints)


@pytest.mark.parametrize("meanwhile", ["before", "after"])
def test_nodes_may_share_the_folder(
    folder: RunFiles, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """Another node saves the same step, while this one gives it its second name: both succeed."""
    link = os.link

    def interrupted(source: Path, name: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        if meanwhile == "before":
            checkpoint.save(folder, content(7), keep=2, best=True)
        link(source, name)
        if meanwhile == "after":
            checkpoint.save(folder, content(7), keep=2, best=True)

    monkeypatch.setattr(os, "link", interrupted)
    checkpoint.save(folder, content(7), keep=2, best=True)
    names = sorted(path.name for path in folder.checkpoints.iterdir())
    assert names == ["best.pt", "step-00000007.pt"]
    assert checkpoint.read(folder.best)["state"]["step"] == 7
