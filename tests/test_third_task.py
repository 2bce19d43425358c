"""A new data set is a folder of two files and a line in the table of tasks."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rackrun.contract.tasks import TASKS
from tests.lab import warm
from tests.lab.data import drawn

ROOT = Path(__file__).parents[1]
NEEDED = ("rackrun", "launcher", "nginx", "shards", "training", "catdog")

RECIPES = '''
from dataclasses import dataclass

from rackrun.training.config import Config


@dataclass(frozen=True)
class Toy(Config):
    """Train a toy."""

    width: int = 3
    """Channels of the toy."""


RECIPES = {"default": Toy}
'''

MODEL = """
from torch import nn

from rackrun.toy.recipes import Toy
from rackrun.training.data.transforms import Transforms
from rackrun.training.task import Task


def build(config: Toy, classes: int) -> nn.Module:
    pooled = nn.Sequential(nn.Conv2d(3, config.width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(pooled, nn.Linear(config.width, classes))


def transforms(config: Toy, epoch: int) -> Transforms:
    return Transforms(32)


TASK = Task("toy", build, transforms)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return the project with a third task."""
    for package in NEEDED:
        without = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, symlinks=True, ignore=without)
    (tmp_path / "toy").mkdir()
    (tmp_path / "rackrun" / "toy").symlink_to("../toy")
    (tmp_path / "toy" / "recipes.py").write_text(RECIPES)
    (tmp_path / "toy" / "model.py").write_text(MODEL)
    table = tmp_path / "rackrun" / "contract" / "tasks.py"
    first = next(iter(TASKS))
    table.write_text(table.read_text().replace(f'"{first}":', f'"toy": (),\n    "{first}":', 1))
    return tmp_path


def python(project: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm.interpreter(), "-m", f"rackrun.{args[0]}", *args[1:]],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def test_a_third_task_trains_and_predicts(project):
    """The launcher knows it, checks its options, trains a step; its weights name an image."""
    help_ = python(project, "launcher", "local", "--help").stdout
    assert "toy" in help_
    refused = python(project, "launcher", "local", "toy", "--width", "x")
    assert (refused.returncode, "not a number" in refused.stderr) == (64, True), refused.stderr
    quick = ("--synthetic", "--epochs", "1", "--steps-per-epoch", "1", "--batch-size", "2")
    rest = ("--width", "2", "--device", "cpu", "--workers", "0", "--no-tensorboard")
    launch = ("launcher", "local", "--python", str(warm.interpreter()))
    trained = python(project, *launch, "--name", "mine", "toy", *quick, *rest)
    assert trained.returncode == 0, trained.stderr
    (weights,) = (project / "runs").glob("*-mine/final.pt")
    (project / "image.jpg").write_bytes(drawn("toy"))
    args = ("toy", "predict", str(weights), "image.jpg", "--json")
    named = python(project, *launch, *args)
    assert named.returncode == 0, named.stderr
    assert len(json.loads(named.stdout)) == 1
