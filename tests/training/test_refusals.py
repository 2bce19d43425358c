"""What a rank would refuse is refused by the launcher, before a run folder exists."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rackrun.catdog.recipes import CatDog
from rackrun.cli.dispatch import run
from rackrun.commandline.program import report
from rackrun.run_folder import RunFolder
from rackrun.shards.open import open_source
from rackrun.terminal import clean_lines
from rackrun.training import checkpoint
from rackrun.training.weights_file import why_no_weights
from tests.training.conftest import MakeShards

EARLIER = Path("runs/20260101-120000-catdog")
OWN = """
from torch import nn, optim
class Net(nn.Linear):
    def __init__(self, classes): ...
class Bare: ...
class Fits(nn.Linear):
    def __init__(self, num_classes, width=3, *, depth=2): ...
class Any(nn.Linear):
    def __init__(self, **options): ...
def build(num_classes, width): ...
def lion(parameters, lr): ...
def passing(function): return lambda *parts, **options: function(parts)
@passing
def made(x): ...
"""


@pytest.fixture
def data(make_shards: MakeShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return shards; the current folder has a run of 2 ranks, own code, and files of no weights."""
    folder = make_shards(train=(8, 4), val=(4, 2))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("own.py").write_text(OWN)
    Path("page.pt").write_text("<!DOCTYPE html>")
    Path("empty.pt").touch()
    torch.save({"weight": torch.zeros(1000)}, "whole.pt")
    save_file({"weight": torch.zeros(1000)}, "whole.safetensors")
    for name in ("whole.pt", "whole.safetensors"):
        Path(name.replace("whole", "cut")).write_bytes(Path(name).read_bytes()[:-100])
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    files = RunFolder(EARLIER)
    files.make()
    settings = asdict(CatDog(data=str(folder), batch_size=4))
    resolved = {"batch": 8, "images": 24, "world_size": 2}
    digest = open_source(str(folder)).manifest.digest
    recorded = {"task": "catdog", "name": "catdog", **settings, "data_sha256": digest}
    files.config.write_text(json.dumps({**recorded, "resolved": resolved}))
    checkpoint.write(files.checkpoint(3), {"state": {"step": 3}})
    Path("cut-off.pt").write_bytes(files.checkpoint(3).read_bytes()[:-5])
    Path("runs/20260101-120001-other/checkpoints").mkdir(parents=True)
    return folder


def typed(command_line: str, data: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code of a local launch, and what it says."""
    options, _, task = command_line.rpartition(";")
    line = [*options.split(), *task.split(), "--data", str(data)]
    try:
        code = run(["./run-local", *line])
    except SystemExit as end:
        code = int(end.code or 0)
    except Exception as error:
        code = report(error, clean_lines)
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "catdog --eval-split val",
        "--nproc 2; catdog --batch-size 4 --resume {earlier}",
        "catdog --batch-size 8 --lr 0.3 --resume {earlier}",
        "catdog --batch-size 8 --resampled --steps-per-epoch 3 --resume {earlier}",
        "catdog --batch-size 8 --resume latest",
        "--nproc 3; catdog --batch-size 4 --exact-epochs --resume {earlier}",
        "catdog --weights whole.pt",
        "catdog --weights whole.safetensors",
        "catdog --weights {earlier}/checkpoints/step-00000003.pt",
        "catdog --model own:Fits",
        "catdog --model own:Any",
        "catdog --optimizer own:made",
        "--nproc 32; catdog --scale-lr --lr 0.1 --optimizer sgd --batch-size 8",
        "--nproc 4; catdog --exact-epochs --global-batch 4",
    ],
)
def test_what_may_be_right_is_not_refused(line, data, capsys):
    """Settings that fit the run, whole files, code whose source leaves it open."""
    options, _, task = line.format(earlier=EARLIER).rpartition(";")
    assert typed(f"--dry-run {options};{task}", data, capsys) == (0, "")


def test_weights_are_judged_as_torch_does(tmp_path):
    """Files of torch.save, old and new, with digest or not, and of safetensors pass."""
    tensors = {"weight": torch.zeros(3)}
    torch.save(tensors, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save(tensors, tmp_path / "new.pt")
    save_file(tensors, tmp_path / "some.safetensors", metadata={"format": "pt"})
    save_file({}, tmp_path / "none.safetensors")
    checkpoint.write(tmp_path / "ours.pt", tensors)
    assert {why_no_weights(path) for path in tmp_path.iterdir()} == {""}
