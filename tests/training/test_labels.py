"""Labels that a model doubts: the rule by hand, and a run on real digits with wrong labels."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rackrun.cli.doctor import main
from rackrun.convert.__main__ import main as convert
from rackrun.errors import UsageError
from rackrun.mnist.model import TASK
from rackrun.mnist.recipes import Mnist
from rackrun.training import loop
from rackrun.training.judge.labels import (
    ENOUGH,
    FOLDS,
    Probabilities,
    doubts,
    held_out_probabilities,
)
from tests.lab.data import digits

TRAIN, VAL = 700, 150
WRONG = 42  # labels


def test_the_rule_is_that_of_the_paper():
    """Held against a loop over its definition: thresholds are a class's mean probability of its own
    images; the likeliest class that reaches its threshold counts, and a class without images has
    none; the share of a label's images that count for others says how many are doubted, and those
    are whose label has the least of its mean."""
    random = np.random.default_rng(4)
    logits = torch.from_numpy(random.normal(0, 2, (400, 6)))
    labels = torch.from_numpy(random.integers(0, 5, 400))  # none of class 5
    logits[torch.arange(400), labels] += 2
    shares = logits.float().softmax(1).tolist()
    means = {
        each: np.mean(
            [row[each] for row, label in zip(shares, labels, strict=True) if label == each]
        )
        for each in range(5)
    }
    estimate = 0.0
    for name in range(5):
        rows = [row for row, label in zip(shares, labels, strict=True) if label == name]
        counted = [
            max(reached, key=lambda each: row[each])
            for row in rows
            if (reached := [each for each in means if row[each] >= ENOUGH * means[each]])
        ]
        estimate += len(rows) * sum(each != name for each in counted) / len(counted)
    expected = {}
    for image, (row, label) in enumerate(zip(shares, labels.tolist(), strict=True)):
        likely = max(range(6), key=lambda each: row[each])
        if likely != label:
            relative = row[label] / means[label]
            expected[image] = (relative, likely, pytest.approx(row[likely] - row[label], abs=1e-6))
    doubted = sorted(expected, key=lambda image: expected[image][0])[: round(estimate)]
    found_doubts = [
        (each.image, each.likely, each.score)
        for each in doubts(Probabilities.of(logits, labels), 6)
    ]
    assert found_doubts == [(image, *expected[image][1:]) for image in doubted]
    assert 10 < len(found_doubts) < len(expected)


def test_a_label_that_is_impossible_is_doubted_though_no_other_class_stands_out():
    """Ten images that might be any of three other classes, but not their own; a model that is sure
    of all labels doubts none of them."""
    sure = torch.eye(4)[torch.arange(200) % 4] * 8
    labels = torch.arange(200) % 4
    assert not list(doubts(Probabilities.of(sure, labels), 4))
    torn = torch.tensor([[-8.0, 1.0, 0.9, 0.8]]).expand(10, 4)
    plain = torch.tensor([[-8.0, 8.0, 0.0, 0.0]]).expand(10, 4)
    logits = torch.cat([sure, torn, plain])
    labels = torch.cat([labels, torch.zeros(20, dtype=torch.long)])
    doubted_images = {doubt.image for doubt in doubts(Probabilities.of(logits, labels), 4)}
    assert (
        set(range(210, 220)) <= doubted_images <= set(range(200, 220)) and len(doubted_images) > 10
    )


def test_no_image_is_judged_by_what_was_fitted_to_it():
    """Labels that have nothing to do with the features: though there are features enough to learn
    all by heart, the answers are right as often as chance is."""
    random = torch.Generator().manual_seed(1)
    features = torch.randn(600, 900, generator=random)
    labels = torch.randint(0, 3, (600,), generator=random)
    held_out = held_out_probabilities(features, labels, 3)
    assert torch.equal(held_out.labels, labels)
    right = (held_out.classes[:, 0] == labels).float().mean()
    assert 0.25 < right < 0.42
    in_sample = Probabilities.of(
        features @ torch.linalg.lstsq(features, _one_hot(labels)).solution, labels
    )
    assert (in_sample.classes[:, 0] == labels).all()  # in sample, all are right


def test_small_classes_are_judged_too():
    """A class with fewer images than folds, and a set of one image, end without an error."""
    labels = torch.tensor([0] * 20 + [1] * 2)
    features = torch.randn(22, 4, generator=torch.Generator().manual_seed(0)) + 5 * labels[:, None]
    assert len(held_out_probabilities(features, labels, 2).labels) == 22
    assert FOLDS > 2


def _one_hot(labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(labels).float()


@pytest.fixture(scope="module")
def messy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, set[str]]:
    """Return shards of digits with wrong labels, a run on them, and the keys of the wrong ones."""
    folder = tmp_path_factory.mktemp("messy")
    images, true = digits()
    labels = true.astype(int)
    random = np.random.default_rng(7)
    flipped = random.choice(TRAIN + VAL, WRONG, replace=False)
    labels[flipped] = (labels[flipped] + random.integers(1, 10, WRONG)) % 10
    for number in range(TRAIN + VAL):
        split = "train" if number < TRAIN else "val"
        path = folder / "raw" / split / str(labels[number]) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[number]).save(path)
    convert(["folder", str(folder / "raw"), str(folder / "shards"), "--workers", "1"])
    config = Mnist(
        data=str(folder / "shards"),
        eval_split="val",
        epochs=12,
        batch_size=16,
        run_folder=str(folder / "run"),
        device="cpu",
        workers=0,
    )
    loop.run(TASK, config)
    return folder / "shards", folder / "run", {f"{labels[each]}_{each}" for each in flipped}


def test_wrong_labels_of_real_digits_are_found(messy, tmp_path, capsys):
    """Of 5 % wrong labels, in train and in val, three quarters are found at least, with few
    others; nine of ten of them get their true class; the surest come first."""
    data, run, wrong = messy
    assert main([str(data), str(run), "--out", str(tmp_path), "--workers", "1"]) == 0
    with (tmp_path / "doctor.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["problem"] == "label"]
    reported = {row["key"] for row in rows}
    assert len(reported & wrong) >= 0.75 * len(wrong)
    assert len(reported & wrong) >= 0.75 * len(reported)
    assert {row["split"] for row in rows} == {"train", "val"}
    assert {row["action"] for row in rows} == {"relabel"}
    true = digits()[1]
    right = [row["new_class"] == str(true[int(row["key"].partition("_")[2])]) for row in rows]
    assert np.mean(right) >= 0.75
    scores = [float(row["score"]) for row in rows]
    assert scores == sorted(scores, reverse=True) and 0 <= min(scores) <= max(scores) <= 1
    assert re.search(r"convert relabel \S+/shards \S+/doctor.csv", capsys.readouterr().out)


def test_a_model_of_other_classes_is_refused(messy, tmp_path, shapes):
    """Its answers would be about nothing: the message has both; so has that for no model."""
    _, run, _ = messy
    with pytest.raises(UsageError, match="2 classes that .* does not have: box, disc; type"):
        main([str(shapes), str(run), "--out", str(tmp_path), "--workers", "1"])
    with pytest.raises(UsageError, match="no such run or file"):
        main([str(shapes), str(tmp_path / "nothing"), "--out", str(tmp_path), "--workers", "1"])
    assert not list(tmp_path.iterdir())
