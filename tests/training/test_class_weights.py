"""Weights of classes in the loss, and of their samples in an epoch."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch

from rackrun.imagenet.model import TASK
from rackrun.imagenet.recipes import ImageNet
from rackrun.training.data.open import open_data
from rackrun.training.loss import class_weights
from rackrun.training.ranks import Ranks

CLASSES = ("cat", "dog", "bird")
SAMPLES = np.array([60, 30, 10])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("balanced", [100 / (3 * count) for count in SAMPLES]),
        ("bird=5", [100 / 140, 100 / 140, 500 / 140]),
        ("cat=0,1=2", [0, 200 / 70, 100 / 70]),
    ],
)
def test_weights_are_1_on_average_over_the_samples(text, expected):
    """So the rate keeps its meaning; `balanced` gives each class the same share of the loss."""
    weights = class_weights(text, CLASSES, lambda: SAMPLES)
    assert weights is not None
    assert weights.tolist() == pytest.approx(expected)
    assert float(weights.numpy() @ SAMPLES) == pytest.approx(100)


def test_balanced_classes_of_one_sample_and_of_none_have_finite_weights():
    """That of a class without samples changes no loss."""
    weights = class_weights("balanced", CLASSES, lambda: np.array([3, 1, 0]))
    assert weights is not None and weights.tolist() == pytest.approx([2 / 3, 2, 2])


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, (20, 20, 20)),
        ({"only_classes": "0,2"}, (25, 0, 25)),
        ({"max_train_samples": 10}, (3, 3, 3)),
    ],
    ids=["all", "of two classes", "the first samples"],
)
def test_balanced_classes_come_equally_often(make_shards, options, shares):
    """--class-weights balanced: 40, 10 and 10 samples come 20 times each in an epoch of 60."""
    data = make_shards(train=(30, 30), val=(), classes=3, labels=(0, 0, 0, 0, 1, 2))
    config = ImageNet(
        data=str(data), class_weights="balanced", image_size=8, batch_size=6, workers=0,
        device="cpu", exact_epochs=True, **options,
    )  # fmt: skip
    alone = Ranks(0, 1, 0, 1, torch.device("cpu"))
    opened = open_data(config, alone, lambda epoch: TASK.transforms(config, epoch), "t", 2)
    drawn = Counter[int]()
    for batch in islice(opened.training(0), opened.steps.per_epoch):
        drawn.update(batch.labels.tolist())
    assert [drawn[label] for label in range(3)] == list(shares)
