"""Models of users: what goes wrong in them is named, with what to type."""

import io
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rackrun.training import checkpoint
from tests.lab import warm
from tests.training.conftest import draw

ROOT = Path(__file__).parents[2]
MODELS = """
import torch
from torch import nn


class Standardised(nn.Module):
    norm = nn.Identity

    def __init__(self, num_classes):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2)
        self.first_norm = self.norm(8)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x):
        x = (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True)
        return self.head(self.first_norm(self.conv(x)).relu().mean((2, 3)))


class Normed(Standardised):
    norm = nn.BatchNorm2d


class Plain(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2)
        self.head = nn.Linear(8 * 15 * 15, num_classes)

    def forward(self, x):
        return self.head(self.conv(x).relu().flatten(1))


class View(Plain):
    def forward(self, x):
        x = self.conv(x).relu()
        return self.head(x.view(x.size(0), -1))


class Ended(Plain):
    def forward(self, x):
        return super().forward(x).softmax(1)


class Weighed(Plain):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.conv = nn.utils.weight_norm(self.conv)


class Lazy(Plain):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.conv, self.head = nn.LazyConv2d(8, 3, stride=2), nn.LazyLinear(num_classes)


class Unused(Plain):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.old_head = nn.Linear(8, 1000)
"""
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a command of training in a folder with the models."""
    (tmp_path / "models.py").write_text(MODELS)

    def command(*args: object) -> "subprocess.CompletedProcess[str]":
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return warm.run("-m", "rackrun.training", *map(str, args), cwd=tmp_path, env=env)

    return command


def options(data: Path, model: str, *more: object) -> list[object]:
    line = "--weights= --image-size 32 --device cpu --workers 0 --no-tensorboard"
    folder = () if "--run-folder" in more else ("--run-folder", "run")
    return ["classify", "--data", data, "--model", f"models:{model}", *line.split(), *folder, *more]


def black() -> bytes:
    image = io.BytesIO()
    Image.new("RGB", (40, 40)).save(image, "JPEG")
    return image.getvalue()


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("more", [(), ("--exact-epochs",)], ids=["drawn", "exact"])
@pytest.mark.parametrize("model", ["Standardised", "Normed"])
def test_an_image_that_makes_the_loss_nan_is_named(run, make_shards, model, more):
    """Before a weight changes by it, with an exit code of its own; a batch norm hides none."""
    data = make_shards(train=(16,), val=(4,), broken={"train_00003": black()})
    ended = run(*options(data, model, "--batch-size", 16, *more))
    assert ended.returncode == 76, ended.stderr
    assert "not finite for shapes-train-000000.tar: train_00003 (step" in ended.stderr


def test_an_image_without_an_answer_is_no_class(run, make_shards, tmp_path):
    """In the validation, an evaluation and a prediction it is named, and numbers stay numbers."""
    data = make_shards(train=(16,), val=(5,), broken={"val_00003": black()})
    trained = run(*options(data, "Standardised", "--epochs", 2, "--batch-size", 8))
    assert trained.returncode == 0, trained.stderr
    named = "not finite for 1 image, counted as wrong: shapes-val-000000.tar: val_00003"
    assert (trained.stdout + trained.stderr).count(named) == 2
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        strict(line)
    ask = ("--model", "models:Standardised", "--device", "cpu", "--json")
    judged = run("evaluate", "run", data, *ask, "--workers", 0, "--csv", "rows.csv")
    result = strict(judged.stdout)
    assert named in judged.stderr and result["samples"] == 5
    assert (
        sum(map(sum, result["confusion"]))
        == sum(each["samples"] for each in result["calibration"])
        == 4
    )
    assert "val_00003,box,,,\n" in (tmp_path / "rows.csv").read_text().replace("\r", "")
    levels = np.arange(1600, dtype=np.uint16).reshape(40, 40)
    Image.fromarray(levels).save(tmp_path / "dark.png")  # a camera has filled 12 of 16 bits
    assert "use at most 14: dark.png; pred" in run("predict", "run", "dark.png", *ask).stderr
    (tmp_path / "black.jpg").write_bytes(black())
    predicted = run("predict", "run", "black.jpg", *ask)
    assert predicted.returncode == 65
    assert strict(predicted.stdout) == [
        {"image": "black.jpg", "error": "the model's output is not finite"}
    ]


@pytest.mark.parametrize(
    ("model", "more", "says"),
    [
        ("View", (), ".*write .reshape or .flatten for .view, or type --channels-last off"),
        ("View", ("--channels-last", "off"), ""),
        ("Weighed", ("--ema-decay", "0.9"), "cannot be copied, as --ema-decay needs"),
        ("Weighed", (), ""),
        ("Lazy", (), ""),
    ],
)
def test_what_torch_would_refuse_later_is_refused_before_the_launch(
    run, make_shards, model, more, says
):
    """By a step on zeros in the check of the task, with the option to type."""
    data = make_shards(train=(16,), val=(4,))
    task, *rest = options(data, model, "--epochs", 1, "--batch-size", 8, *more)
    checked = run(task, "check", *rest)
    assert checked.returncode == (1 if says else 0), checked.stderr
    if says:
        assert re.search(f"^error: --model models:{model}: .*{says}", checked.stderr, re.M)
    trained = run(task, *rest)
    assert trained.returncode == (1 if says else 0), trained.stderr
    if model == "View" and says:
        assert "--channels-last off" in trained.stderr.splitlines()[-1]


def test_unused_layers_are_for_one_rank(run, make_shards):
    """Several exchange all gradients: the layers are named, with the option that rests them."""
    data = make_shards(train=(16,), val=(4,))
    task, *rest = options(data, "Unused")
    needs = json.loads(run(task, "check", *rest).stdout)
    assert needs["most_ranks"] == 1
    assert "does not use old_head, " in needs["why_not_more"]
    assert "type --freeze old_head" in needs["why_not_more"]
    assert json.loads(run(task, "check", *rest, "--freeze", "old_head").stdout)["most_ranks"] == 0


def test_a_softmax_at_the_end_is_remarked_on(run, make_shards):
    """Once, at the first step."""
    data = make_shards(train=(16,), val=(4,))
    for model, times in (("Ended", 1), ("Plain", 0)):
        ended = run(*options(data, model, "--epochs", 1, "--run-folder", model))
        assert (ended.stdout + ended.stderr).count("leave the softmax out") == times


def test_published_weights_are_used_as_they_are(run, make_shards, tmp_path):
    """A file that no run has written predicts, is evaluated and exported; its classes are named."""
    data = make_shards(train=(16,), val=(4,))
    assert run(*options(data, "Plain", "--mean", 0.4, "--std", 0.2)).returncode == 0
    content = checkpoint.read(tmp_path / "run" / "final.pt")
    torch.save({"state_dict": content["model"]}, tmp_path / "published.pth")
    (tmp_path / "names.txt").write_text("disc\nbox\n")
    (tmp_path / "image.jpg").write_bytes(draw(1, 7))
    mine = [
        "--weights",
        "published.pth",
        "--model",
        "models:Plain",
        "--image-size",
        "32",
        "--mean",
        "0.4",
        "--std",
        "0.2",
    ]
    ask, named = ("--model", "models:Plain"), [*mine, "--classes", "names.txt"]
    for command, *rest in (
        ("predict", "image.jpg", "--json", "--device", "cpu"),
        ("evaluate", data, "--json", "--device", "cpu", "--workers", 0),
    ):
        published, own = run(command, *named, *rest), run(command, "run", *rest, *ask)
        assert published.returncode == 0, published.stderr
        assert json.loads(published.stdout) == json.loads(own.stdout)
        assert "32 of 37 px, mean 0.4,0.4,0.4, std 0.2,0.2,0.2" in published.stderr
    assert run("export", *named, "out.safetensors").returncode == 0
    (tmp_path / "names.txt").write_text("disc\nbox\ncross\n")
    refused = run("predict", *named, "image.jpg")
    assert refused.returncode == 74, refused.stderr
    assert "type --classes with the names" in refused.stderr
    assert run("predict", *mine, "image.jpg").returncode == 64
    assert run("predict", "run", "image.jpg", *ask, "--classes", "names.txt").returncode == 64
