"""What a rank would refuse is refused by the launcher, before a run folder exists."""

import json
import sys
from dataclasses import asdict, replace
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
def triangle(step): ...
@triangle
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


REFUSED = [
    ("--python ./bare-python; catdog --model timm:resnet18", "bare-python has no timm"),
    ("--python ./bare-python; catdog --track mlflow", "bare-python has no mlflow"),
    ("--python ./bare-python; catdog --track wandb", "bare-python has no wandb"),
    ("catdog --eval-split test", "no samples in the split 'test'; there are in: train, val"),
    ("--nproc 2; catdog --batch-size 8 --resume {earlier}", "16 images per step here, 8 in the"),
    ("catdog --batch-size 4 --resume {earlier}", "4 images per step here, 8 in the checkpoint;"),
    ("--nproc 3; catdog --batch-size 4 --resume {earlier}", "start as many ranks as before"),
    ("catdog --batch-size 8 --steps-per-epoch 2 --resume {earlier}", "--steps-per-epoch 2 here"),
    ("catdog --batch-size 8 --layer-decay 0.5 --resume {earlier}", "--layer-decay 0.5 here, 1"),
    (
        "catdog --batch-size 8 --exact-epochs --global-batch 9 --resume {earlier}",
        "--global-batch 9 here, 8 in the checkpoint",
    ),
    ("--name x; catdog --resume latest", "no run x of catdog in"),
    ("catdog --resume latest --batch-size 4", "4 images per step here, 8 in the checkpoint"),
    ("catdog --resume runs/20260101-120001-other", "has no checkpoint"),
    ("catdog --resume cut-off.pt", "cut short, or not a checkpoint"),
    ("catdog --weights page.pt", "--weights page.pt: not a file of weights and plain data: a web"),
    ("catdog --weights empty.pt", "it is empty"),
    ("catdog --weights cut.pt", "--weights cut.pt: not whole"),
    ("catdog --weights cut.safetensors", "not whole, as safetensors"),
    ("catdog --model own:Net", "cannot be called with num_classes; type: def Net(num_classes)"),
    ("catdog --model nomod:Net", "no module nomod in {folder} or installed; type MODULE:NAME"),
    ("catdog --model own:Bare", "cannot be called with num_classes"),
    ("catdog --model own:build", "cannot be called with num_classes"),
    ("catdog --optimizer own:lion", "cannot be called with params and lr"),
    ("catdog --lr-schedule own:triangle", "cannot be called with step and steps"),
    ("--nproc 5; catdog --exact-epochs --global-batch 4", "5 ranks: --global-batch 4 has not"),
    ("--nproc 40; catdog --scale-lr --lr 0.1 --optimizer sgd", "40 ranks: --scale-lr is known to"),
    ("catdog --compile", "--compile needs a C++ compiler, and there is no 'no-such-compiler'"),
]


@pytest.mark.parametrize(("line", "says"), REFUSED)
def test_a_launch_here_is_refused_before_there_is_a_run_folder(
    line, says, data, capsys, monkeypatch
):
    """One line says what is wrong, and nothing is started."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    before = sorted(Path("runs").iterdir())
    code, message = typed(line.format(earlier=EARLIER), data, capsys)
    assert code == 64
    assert says.format(folder=Path.cwd()) in message
    assert message.count("\n") == 1
    assert sorted(Path("runs").iterdir()) == before


@pytest.mark.parametrize("name", ["rackrun.py", "rackrun/__init__.py"])
def test_a_module_that_hides_ours_is_refused(name, data, capsys):
    """Ranks would run it in place of the training; a script of that name is nobody's trouble."""
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("")
    code, message = typed("catdog --epochs 1", data, capsys)
    assert code == 64
    assert f"{name}: ranks would import it in place of rackrun; rename" in message
    assert len(list(Path("runs").iterdir())) == 2
    assert run(["./run-local", "--dry-run", "--", "python", name]) == 0


@pytest.mark.parametrize(
    "line",
    [
        "catdog --eval-split val",
        "--nproc 2; catdog --batch-size 4 --resume {earlier}",
        "catdog --batch-size 8 --lr 0.3 --resume {earlier}",
        "catdog --batch-size 8 --steps-per-epoch 3 --resume {earlier}",
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


def test_damaged_shards_are_refused(data, capsys):
    """A manifest that cannot be read ends a launch as it would end a rank, with 65."""
    (data / "dataset.json").write_text("{")
    code, message = typed("catdog", data, capsys)
    assert (code, "dataset.json" in message, message.count("\n")) == (65, True, 1)
    assert [path.name for path in Path("runs").iterdir() if path.is_symlink()] == []


def test_a_manifest_without_training_samples_is_refused(data, capsys):
    """A folder with val alone can be evaluated on, and not trained on."""
    whole = open_source(str(data)).manifest
    only = replace(whole, splits=(whole.split("val"),))
    (data / "dataset.json").write_bytes(only.serialise())
    code, message = typed("catdog", data, capsys)
    assert (code, "no samples in the split 'train'; there are in: val" in message) == (64, True)
