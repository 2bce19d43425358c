"""Transfer learning as docs/guides/fine-tune.md shows it, with small models, on cats and dogs."""

import hashlib
import json
import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision import models

from rackrun.catdog.model import TASK
from rackrun.run_folder import RunFolder
from rackrun.training import checkpoint
from rackrun.training import train as loop
from rackrun.training.entry import run_command
from tests.lab import warm
from tests.lab.servers import served
from tests.training.conftest import same_weights, settings

ROOT = Path(__file__).parents[2]
MODEL = "shufflenet_v2_x0_5"


def published(folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """Write weights of a model; return the name of the file, and the weights."""
    torch.manual_seed(5)
    weights = models.get_model(MODEL).state_dict()
    folder.mkdir()
    torch.save(weights, folder / "w")
    digest = hashlib.sha256((folder / "w").read_bytes()).hexdigest()
    name = f"{MODEL}-{digest[:8]}.pth"
    (folder / "w").rename(folder / name)
    return name, weights


def test_published_weights_are_tuned_on_two_ranks(tmp_path):
    """Downloaded once for a host; head first, then all; the rate falls, the run ends early, and
    final.pt has the best weights."""
    name, weights = published(tmp_path / "www")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCH_HOME": str(tmp_path / "home"),
    }
    data, folder = tmp_path / "data", RunFolder(tmp_path / "run")
    drawn = warm.run(
        "-m", "rackrun.catdog", "demo", data, "--images", 32, cwd=tmp_path, env=environment
    )
    assert drawn.returncode == 0, drawn.stderr
    with served(tmp_path / "www") as (address, asked):
        weights_url = f"{address}/{name}"
        args = [
            *("--data", data / "shards", "--model", MODEL, "--weights", weights_url),
            *("--image-size", 32, "--batch-size", 7, "--epochs", 12, "--head-epochs", 1),
            *("--head-lr", 1e-2, "--lr", 2e-3, "--plateau-epochs", 1, "--patience", 2),
            *("--precision", "bf16", "--device", "cpu", "--workers", 0, "--keep-checkpoints", 99),
            *("--run-folder", folder.path),
        ]  # fmt: skip
        job = warm.ranks(
            2, "-m", "rackrun.training", "classify", *args,
            env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        outputs = "".join(rank.communicate()[0] for rank in job)
    assert [rank.returncode for rank in job] == [0, 0], outputs
    assert asked == [f"/{name}"]
    assert f"checkpoints/{name}; the last layer (fc.weight, fc.bias) has 2 classes" in outputs
    ended = re.search(r"ends after epoch (\d+): 2 evaluations without a better one", outputs)
    assert ended and 3 <= int(ended[1]) < 12, outputs

    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    rates = {math.ceil(line["epoch"]): line["rate"] for line in lines if line["kind"] == "train"}
    assert (rates[1], rates[2]) == (1e-2, 2e-3) and 0 < rates[int(ended[1])] < 3e-4
    evaluations = [(line["top1"], -line["loss"]) for line in lines if line["kind"] == "evaluate"]
    final, best = checkpoint.read(folder.final), checkpoint.read(folder.best)["state"]
    assert final["accuracy"] == best["accuracy"] == pytest.approx(max(evaluations)[0], abs=1e-6)
    assert all(torch.equal(final["model"][name], best["model"][name]) for name in final["model"])
    assert list(folder.tensorboard.glob("events.*"))

    body = [name for name in weights if not name.startswith("fc.") and "tracked" not in name]
    steps = [checkpoint.read(path)["state"] for path in checkpoint.steps_in(folder.checkpoints)]
    for state, tuned in ((steps[0]["model"], False), (steps[-1]["model"], True)):
        kept = [torch.equal(state[name], weights[name]) for name in body]
        assert not any(kept) if tuned else all(kept)
    Image.new("RGB", (80, 60), "orange").save(tmp_path / "cat.png")
    named = warm.run(
        "-m", "rackrun.training", "classify", "predict", folder.final, tmp_path / "cat.png",
        "--json",
        env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert named.returncode == 0, named.stderr


STAGED: dict[str, Any] = {
    "epochs": 24, "optimizer": "sgd", "lr": 0.3, "ema_decay": 0.0,
    "head_epochs": 2, "head_lr": 1e-2, "freeze": "stem.0", "keep_checkpoints": 99,
    "lr_schedule": "plateau", "plateau_epochs": 1, "patience": 2, "final": "best",
}  # fmt: skip


def test_a_resume_in_any_stage_goes_on_bit_for_bit(shapes, tmp_path, capsys):
    """While the head trains, while evaluations are waited for, and after the run has ended."""
    whole = tmp_path / "whole"
    assert loop.run(TASK, settings(shapes, whole, **STAGED)) == 0
    saved = checkpoint.steps_in(whole / "checkpoints")
    assert 4 <= len(saved) < 24, "no early end: choose another rate"
    for position in (0, len(saved) // 2, -1):
        folder = tmp_path / f"from {saved[position].stem}"
        resumed = settings(shapes, folder, resume=str(saved[position]), **STAGED)
        assert loop.run(TASK, resumed) == 0
        assert same_weights(whole, folder)
        assert f"ends after epoch {len(saved)}: 2 evaluations" in capsys.readouterr().out


def test_defaults_that_need_a_split_adapt(make_shards, tmp_path, capsys):
    """classify on shards without a validation split trains, and says what it does without."""
    data, run = make_shards(train=(20,), val=()), tmp_path / "run"
    args = [
        *("--data", str(data), "--model", "squeezenet1_1", "--weights", "", "--epochs", "1"),
        *("--image-size", "32", "--batch-size", "20", "--workers", "0", "--device", "cpu"),
    ]
    assert run_command("classify", "test", ["check", *args]) == 0
    assert run_command("classify", "test", [*args, "--run-folder", str(run)]) == 0
    errors = capsys.readouterr().out
    adapted = "--patience 0 --lr-schedule cosine --final last"
    assert f"has no split 'val': trains without evaluation, with {adapted}" in errors
    config = json.loads((run / "config.json").read_text())
    assert (config["patience"], config["lr_schedule"], config["final"]) == (0, "cosine", "last")
    assert (run / "final.pt").exists()


@pytest.mark.parametrize(
    ("args", "lines"),
    [
        (
            ("--weights", "", "--epochs", "1"),
            ["epoch 1: all layers train, lr 0.0001, plateau, from random weights (hence no"
             " --head-epochs)"],
        ),
        (
            ("--weights", "{weights}", "--epochs", "3", "--freeze", "features.0"),
            ["epochs 1-2: only the last layer (classifier.1) trains, lr 0.001, plateau, from"
             " weights {weights}",
             "epoch 3: all layers but features.0 train, lr 0.0001, plateau"],
        ),
    ],
    ids=["no weights", "two stages"],
)  # fmt: skip
def test_the_first_lines_name_the_stages(make_shards, tmp_path, capsys, args, lines):
    """Before step 1: which layers train, in which epochs, at which rate, from which weights; and
    how many images the classes have."""
    data = make_shards(train=(9,), val=(4,), classes=3, labels=(0, 0, 1))
    weights = tmp_path / "weights.pt"
    torch.save(models.squeezenet1_1(num_classes=3).state_dict(), weights)
    named = [arg.format(weights=weights) for arg in args]
    typed = [
        *("--data", str(data), "--model", "squeezenet1_1", "--image-size", "32", *named),
        *("--batch-size", "9", "--workers", "0", "--device", "cpu"),
        *("--run-folder", str(tmp_path / "run")),
    ]
    assert run_command("classify", "test", typed) == 0
    before, _, _ = capsys.readouterr().out.partition("step 1/1")
    stages = [line for line in before.splitlines() if " train" in line and line.startswith("epoch")]
    assert stages == [line.format(weights=weights) for line in lines]
    assert "3 (box) to 6 (disc) training images of a class; none of 1 class, which" in before
