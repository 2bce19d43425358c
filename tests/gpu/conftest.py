"""Runs on a GPU, whose ranks are fresh Pythons: CUDA does not survive a fork."""

import json
import sys

import pytest

from rackrun import RunFolder
from tests.lab.data import drawn_shards
from tests.lab.run import run, start, write

SMALL = {
    **{"image_size": 32, "batch_size": 12, "epochs": 2, "workers": 2, "crop_area": 1},
    **{"optimizer": "sgd", "lr": 0.002, "warmup_epochs": 0, "log_every_steps": 1},
    **{"exact_epochs": True, "no_flip": True, "no_tensorboard": True},
}
"""Settings of six steps on 36 images, the same ones on any number of ranks."""

WATCHED = """\
import json, os, pathlib, time
import torch
from torch import nn

class Watched(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 32, 3, padding=1), nn.Linear(32, num_classes)

    def forward(self, images):
        features = self.first(images)
        if self.training and images.is_cuda:
            time.sleep(float(os.environ.get("SECONDS_PER_STEP", 0)))
            seen = {
                "pid": os.getpid(),
                "channels_last": features.is_contiguous(memory_format=torch.channels_last),
                "allocated": torch.cuda.memory_allocated(),
                "peak": torch.cuda.max_memory_allocated(),
            }
            with pathlib.Path("seen.jsonl").open("a") as file:
                file.write(json.dumps(seen) + "\\n")
        return self.last(features.relu().mean((2, 3)))
"""
"""A model that notes in each step what it finds on the GPU."""


class Run(RunFolder):
    """A run that is done."""

    @property
    def steps(self):
        """Return what metrics.jsonl has of each step, by its number."""
        lines = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        return {line["step"]: line for line in lines if line["kind"] == "train"}

    @property
    def losses(self):
        """Return the loss of each step, by its number."""
        return {number: line["loss"] for number, line in self.steps.items()}


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """Return shards of cats and dogs."""
    return drawn_shards(tmp_path_factory.mktemp("shards"), 40)


@pytest.fixture
def command(shards, tmp_path):
    """Return what makes a command line that trains on GPUs, from settings as `rackrun.train`'s."""
    write(tmp_path, {"watched.py": WATCHED})

    def line(launcher, settings):
        words = [f"rackrun local --plain --python {sys.executable} {launcher}"]
        words += [f"catdog --device cuda --data {shards}"]
        for name, value in {**SMALL, **settings}.items():
            words += [f"--{name.replace('_', '-')}", "" if value is True else str(value)]
        return " ".join(words)

    return line


@pytest.fixture
def train(command, tmp_path):
    """Return what trains to the end."""

    def trained(launcher="--nproc 1", **settings):
        result = run(command(launcher, settings), tmp_path)
        assert result.code == 0, result
        return Run((tmp_path / "runs" / "latest").resolve())

    return trained


@pytest.fixture
def starting(command, tmp_path):
    """Return what starts to train."""
    return lambda launcher, **settings: start(command(launcher, settings), tmp_path)


@pytest.fixture
def seen(tmp_path):
    """Return what returns the notes of `watched:Watched`, none before its first step."""
    path = tmp_path / "seen.jsonl"
    return lambda: (
        [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    )
