"""Checkpoints: whole or absent, verified, of this run, and never code."""

import json
import os
import re
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rackrun.catdog.recipes import CatDog, DemoRecipe
from rackrun.errors import SaveError, UsageError
from rackrun.run_folder import RunFolder
from rackrun.training import checkpoint
from rackrun.training.run import compatibility, resume
from tests.lab import warm
from tests.lab.sources import flipped


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "20260101-000000-catdog")
    folder.make()
    return folder


def content(step: int) -> checkpoint.Content:
    return {"state": {"step": step, "weight": torch.full((100,), float(step))}}


@pytest.mark.security("CKPT-2")
def test_ckpt_2_no_flipped_byte_changes_what_is_read(folder):
    """One flipped byte makes a file damaged, but in its padding; torch would load most of them."""
    checkpoint.write(folder.final, content(3))
    good = folder.final.read_bytes()
    refused = 0
    for position in range(0, len(good), 7):
        folder.final.write_bytes(
            good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :]
        )
        try:
            state = checkpoint.read(folder.final)["state"]
        except SaveError as error:
            assert re.match(f"{folder.final}: ", str(error))
            refused += 1
        else:
            assert state["step"] == 3 and state["weight"].tolist() == [3.0] * 100
    assert refused * 7 > 400, "the weights alone have as many bytes"


def test_the_last_ones_and_the_best_are_kept(folder):
    """Old checkpoints go, the best one stays under a name of its own."""
    for step in range(1, 7):
        checkpoint.save(folder, content(step), keep=2, best=step == 3)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == [
        "best.pt",
        "step-00000005.pt",
        "step-00000006.pt",
    ]
    assert checkpoint.read(folder.best)["state"]["step"] == 3
    # Of a run that goes on from an earlier step, beside what it passed over.
    assert checkpoint.save(folder, content(4), keep=1, best=False).exists()


def test_the_newest_whole_one_is_taken_and_the_others_are_named(folder, capsys):
    """Damage costs an interval, not the run, and a line says so."""
    for step in (1, 2, 3, 4):
        checkpoint.save(folder, content(step), keep=9, best=False)
    folder.checkpoint(4).write_bytes(b"")
    flipped(200)(folder.checkpoint(3))
    path, _ = resume.requested_checkpoint(str(folder.path), "catdog")
    assert path == folder.checkpoint(2)
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "step-00000004.pt: cut short" in errors[0]
    assert "step-00000003.pt: damaged" in errors[1]


def test_when_none_is_whole_nothing_starts(folder):
    """A run never begins again from scratch because its checkpoints are damaged."""
    checkpoint.save(folder, content(1), keep=2, best=False)
    folder.checkpoint(1).write_bytes(b"x" * 1000)
    with pytest.raises(SaveError, match="no checkpoint in it is intact; leave out --resume"):
        resume.requested_checkpoint(str(folder.path), "catdog")


def test_latest_is_the_newest_run_of_this_launch(tmp_path, monkeypatch):
    """In the launcher's folder of runs, of its name and of this task: never another experiment."""
    runs = tmp_path / "experiments"
    names = ("1-low-lr", "2-low-lr", "3-low-lr", "4-low-lr-2", "5-high-lr", "6-very-low-lr")
    tasks = dict.fromkeys(names, "catdog") | {"3-low-lr": "imagenet"}
    for name, task in tasks.items():
        folder = RunFolder(runs / f"2026010{name[0]}-000000-{name[2:]}")
        folder.make()
        checkpoint.save(folder, content(1), keep=2, best=False)
        folder.config.write_text(json.dumps({"task": task, "name": name[2:]}))
    monkeypatch.setenv("RACKRUN_RUN_FOLDER", str(runs / "20260107-000000-low-lr"))
    monkeypatch.setenv("RACKRUN_RUN_NAME", "low-lr")
    assert (
        resume.requested_checkpoint("latest", "catdog")[0].parents[1].name
        == "20260102-000000-low-lr"
    )
    monkeypatch.setenv("RACKRUN_RUN_NAME", "other")
    with pytest.raises(UsageError, match=f"no run other of catdog in {runs} has a checkpoint"):
        resume.requested_checkpoint("latest", "catdog")


SMALL, LARGE = nn.Linear(2, 3), nn.Linear(2, 4)


def described(task: str = "catdog", dataset: str = "pets", **settings: Any) -> checkpoint.Content:
    config = asdict(CatDog(**settings))
    return {"task": task, "config": config, "dataset": dataset, "classes": ["cat", "dog"]}


def saved(about: checkpoint.Content, model: nn.Module, data: str = "dd", **changed: Any) -> Any:
    batch = about["config"]["batch_size"]
    identity = compatibility.identity(about, model, data, changed.pop("batch", batch), 5)
    return {**about, "identity": {**identity, **changed}}


@pytest.mark.parametrize(
    ("local", "remote", "says"),
    [
        ((described(), SMALL), (described(), SMALL, "dd", 128), r"\(with 1 rank: --batch-size 128"),
        (
            (described(data="a"), SMALL, "0123456789"),
            (described(data="b", dataset="birds"), LARGE, "9876543210"),
            "data: pets, 2 classes, a, SHA-256 01234567… here, birds, 2 classes, b, SHA-256 98765",
        ),
        (
            (described(), SMALL),
            (described(), LARGE),
            r"weight is float32 \(4, 2\) there and float32 \(3, 2\) here",
        ),
        (
            (described(task="imagenet"), SMALL),
            (described(), LARGE),
            "run: task imagenet here, catdog in the checkpoint$",
        ),
    ],
)
@pytest.mark.security("CKPT-3")
def test_ckpt_3_what_cannot_be_continued_is_refused_in_words_of_options(local, remote, says):
    """Each difference that matters is named as it is typed, and no consequence of it."""
    about, model, *data = local
    names = ("data", "batch")
    result = saved(*remote[:2], **dict(zip(names, remote[2:], strict=False)))
    expected = saved(about, model, *data)["identity"]
    with pytest.raises(SaveError, match=says):
        compatibility.check(expected, about, result, Path("step.pt"))


def test_settings_that_changed_are_named():
    """What a run may change, all but places, files and logs."""
    remote = described(lr=0.1, epochs=2, data="a", workers=3, log_every_steps=7)
    local = asdict(DemoRecipe(lr=0.01, width=64, data="b", resume="x", run_folder="y"))
    changes = compatibility.changes(local, remote).split("; ")
    assert "--lr 0.01 here, 0.1 in the checkpoint" in changes
    assert "--epochs 10 here, 2 in the checkpoint" in changes
    assert "--recipe demo here, default in the checkpoint" in changes
    assert not [change for change in changes if re.match("--(data|workers|log|run|resume)", change)]


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path):
    """What does not fit is no file at all, the last checkpoint stays, and the code is 74."""
    program = (
        "import resource, sys, torch\n"
        "from pathlib import Path\n"
        "from rackrun.commandline.program import run\n"
        "from rackrun.training import checkpoint\n"
        "from rackrun.run_folder import RunFolder\n"
        "def main(args):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "    folder = RunFolder(Path(args[0]))\n"
        "    folder.make()\n"
        "    for step, size in ((1, 10), (2, 1_000_000)):\n"
        "        state = {'step': step, 'weight': torch.zeros(size)}\n"
        "        checkpoint.save(folder, {'state': state}, keep=1, best=False)\n"
        "run(main)\n"
    )
    done = warm.run("-c", program, tmp_path)
    assert done.returncode == 74
    assert "step-00000002.pt: cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    folder = RunFolder(tmp_path)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-00000001.pt"]
    assert checkpoint.read(folder.checkpoint(1))["state"]["step"] == 1


@pytest.mark.security("CKPT-2")
def test_a_kill_at_any_moment_leaves_whole_checkpoints_only(folder):
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
def test_nodes_may_share_the_folder(folder, monkeypatch, meanwhile):
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


def test_the_best_one_of_an_earlier_run_is_taken_over(folder, tmp_path):
    """Unless this run has a best one already; where files have no second names, by a copy."""
    later = RunFolder(tmp_path / "20260102-000000-catdog")
    later.make()
    checkpoint.keep_best(folder, later)
    assert not later.best.exists()
    checkpoint.save(folder, content(3), keep=2, best=True)
    checkpoint.keep_best(folder, later)
    assert checkpoint.read(later.best)["state"]["step"] == 3
    checkpoint.save(folder, content(4), keep=2, best=True)
    checkpoint.keep_best(folder, later)
    assert checkpoint.read(later.best)["state"]["step"] == 3


def test_a_disk_without_links_has_a_copy_of_the_best_one(folder, monkeypatch):
    """As FAT and some network file systems."""

    def refused(source: Path, name: Path) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refused)
    checkpoint.save(folder, content(3), keep=1, best=True)
    checkpoint.save(folder, content(4), keep=1, best=False)
    assert checkpoint.read(folder.best)["state"]["step"] == 3
    assert len(list(folder.checkpoints.iterdir())) == 2
