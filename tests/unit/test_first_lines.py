"""The first lines of a run: what runs where, in whole facts."""

from pathlib import Path

import numpy as np
import pytest

from rackrun.training.config import Config
from rackrun.training.first_lines import Facts, class_lines, lines

H100 = "NVIDIA H100 80GB HBM3"
CLUSTER: Facts = {
    "device": "cuda",
    "precision": "bf16",
    "world_size": 64,
    "hosts": [{"name": f"gpu{number:02}", "devices": [H100] * 8} for number in range(8)],
    "cores": 12,
    "dataset": "imagenet",
    "images": 1_281_167,
    "classes": 1000,
    "model": "resnet50",
    "parameters": 25_557_032,
    "batch": 16_384,
    "torch": "2.15.0+cu132",
    "driver": "570.86.15",
}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (
            CLUSTER,
            [
                "64 ranks on 8 hosts, 8x H100 80GB HBM3 each, torch 2.15.0+cu132, driver 570",
                "imagenet, 1,281,167 images in 1,000 classes",
                "resnet50, 25.6 M parameters, bf16, batch 16,384",
                "run 3fa81c02, /runs/20260101-000000-imagenet",
            ],
        ),
        (
            {
                **CLUSTER,
                **{"device": "cpu", "world_size": 1, "cores": 2, "images": 0, "batch": 64},
                "hosts": [{"name": "a\x1b[2J", "devices": ["CPU"]}],
            },
            ["1 rank on a␛[2J (CPU, 2 cores), torch 2.15.0", "synthetic images in 1,000 classes"],
        ),
        (
            {**CLUSTER, "hosts": [*CLUSTER["hosts"], {"name": "old", "devices": ["NVIDIA A40"]}]},
            ["64 ranks on 9 hosts, 8x H100 80GB HBM3 or 1x A40 each"],
        ),
    ],
    ids=["cluster", "laptop", "mixed"],
)
def test_a_run_says_what_runs_where(facts, expected, monkeypatch):
    """Ranks, hosts, GPUs, versions, data, model and folder come first."""
    monkeypatch.setenv("RACKRUN_RUN_ID", "3fa81c02" + 24 * "0")
    message = lines(facts, Path("/runs/20260101-000000-imagenet"))
    for line in expected:
        assert any(each.startswith(line) for each in message), message


def test_classes_that_training_or_validation_lacks_are_named():
    """What --only-classes leaves out is no "each class", and its images bound the accuracy."""
    names = ("blue", "green", "red")

    def said(sizes: list[int], evaluated: list[int], only: str = "") -> list[str]:
        config = Config(only_classes=only)
        return list(class_lines(config, names, np.array(sizes), np.array(evaluated)))

    assert said([14, 14, 14], [1, 1, 1]) == ["14 training images of each class"]
    assert said([14, 0, 14], [4, 4, 4], "red,blue") == [
        "14 training images of each of 2 classes; none of 1 class, left out by --only-classes:"
        " green",
        "validation accuracy is at most 66.7%: 4 of 12 images are of classes without training"
        " images",
    ]
    assert said([14, 13, 14], [4, 0, 0]) == [
        "13 (green) to 14 (blue) training images of a class",
        "no validation images of 2 classes: green, red",
    ]
    assert said([14, 14, 14], [1, 1, 22])[1:] == [
        "validation accuracy is 91.7% if all answers are red: look at the accuracy of each class,"
        " too"
    ]
    assert said([14, 14, 14], [0, 0, 0]) == ["14 training images of each class"]
