"""`rackrun evaluate`: exact counts, held against a loop written from the definitions."""

import csv
import json
import math
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rackrun.contract.files import MANIFEST_NAME
from rackrun.shards.index import Manifest
from rackrun.shards.open import open_source
from rackrun.shards.samples import samples
from rackrun.training.data.ring import Batch
from rackrun.training.judge.command import main
from rackrun.training.judge.evaluation import Evaluation
from rackrun.training.ranks import Ranks
from rackrun.training.scores import Table
from rackrun.training.trained import load_of_any_task
from tests.lab import warm
from tests.lab.ranks import without_gloo
from tests.training.conftest import SHAPES

Answers = npt.NDArray[np.float64]
CPU = torch.device("cpu")
ALONE = ("--workers", "0", "--device", "cpu")


@pytest.fixture(scope="module")
def three(make_shards: Callable[..., Path]) -> Path:
    """Return shards of three classes."""
    return make_shards(classes=3)


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run the command in this process; return its JSON."""

    def run(*args: str | Path) -> Any:
        assert main([*map(str, args), *ALONE, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def answers_by_hand(final: Path, data: Path, flip: bool) -> tuple[Answers, list[int], list[str]]:
    """Return the answers to all validation samples one by one, their labels and keys."""
    trained = load_of_any_task(final)
    source = open_source(str(data))
    result, labels, keys = [], [], []
    for number in range(len(source.manifest.split("val").shards)):
        for sample in samples(source, "val", number):
            pixels = trained.transforms.for_evaluation(sample.image)
            views = [pixels, pixels[:, ::-1]] if flip else [pixels]
            images = torch.stack([torch.tensor(view.copy()) for view in views]).permute(0, 3, 1, 2)
            with torch.no_grad():
                outputs = trained.model(trained.transforms.normalized(images))
            result.append(outputs.double().mean(0).numpy())
            labels.append(sample.label)
            keys.append(sample.key)
    return np.array(result), labels, keys


def by_hand(outputs: Answers, labels: list[int]) -> dict[str, Any]:
    """Return what JSON should say, from the definitions and sample by sample."""
    confusion = [[0] * 3 for _ in range(3)]
    bins: dict[int, list[tuple[float, bool]]] = {}
    loss = 0.0
    for reply, label in zip(outputs, labels, strict=True):
        shares = [math.exp(each) / sum(map(math.exp, reply)) for each in reply]
        predicted = shares.index(max(shares))
        confusion[label][predicted] += 1
        loss -= math.log(shares[label])
        # Guo et al. 2017: bin m of 15 holds the confidences in ((m - 1) / 15, m / 15]
        number = next(m for m in range(1, 16) if shares[predicted] <= m / 15)
        bins.setdefault(number, []).append((shares[predicted], predicted == label))
    gaps = [abs(sum(right - share for share, right in each)) for each in bins.values()]
    return {
        "samples": len(labels),
        "loss": pytest.approx(loss / len(labels), rel=1e-5),
        "top1": sum(confusion[each][each] for each in range(3)) / len(labels),
        "top5": 1.0,
        "confusion": confusion,
        "calibration_error": pytest.approx(sum(gaps) / len(labels), rel=1e-4),
    }


@pytest.mark.parametrize("flip", [False, True])
def test_all_measures_are_those_of_their_definitions(evaluate, untrained, three, tmp_path, flip):
    """Loss, accuracy, confusion, calibration, classes and CSV agree with a loop by hand."""
    outputs, labels, keys = answers_by_hand(untrained, three, flip)
    expected = by_hand(outputs, labels)
    table = tmp_path / "all.csv"
    result = evaluate(untrained.parent, three, "--csv", table, *(["--flip"] if flip else []))
    assert {name: result[name] for name in expected} == expected
    for number, score in enumerate(result["classes"]):
        row, column = expected["confusion"][number], np.array(expected["confusion"])[:, number]
        assert (score["samples"], score["right"]) == (sum(row), row[number])
        assert score["accuracy"] == row[number] / sum(row)
        assert score["precision"] == (row[number] / column.sum() if column.sum() else None)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["key"] for row in rows] == keys
    assert [row["label"] for row in rows] == [SHAPES[label] for label in labels]
    assert [row["prediction"] for row in rows] == [SHAPES[best] for best in outputs.argmax(1)]
    assert {row["shard"] for row in rows} == {"shapes-val-000000.tar", "shapes-val-000001.tar"}


def test_a_table_computed_on_paper():
    """Four answers of two classes: each number below was computed by hand."""
    shares = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.5, 0.5]], dtype=torch.float64)
    table = Table(2)
    labels = torch.tensor([0, 1, 1, 0])
    table.add(shares[:3].log(), Batch(torch.empty(3), labels[:3]))
    table.add(shares[3:].log(), Batch(torch.empty(1), labels[3:], left_out=("a", "b")))
    evaluations = table.scores(Ranks(0, 1, 0, 1, CPU))
    assert evaluations.confusion.tolist() == [[2, 0], [1, 1]]
    assert (evaluations.counts.samples, evaluations.counts.top1, evaluations.counts.skipped) == (
        4,
        3,
        2,
    )
    assert evaluations.counts.loss == pytest.approx(-math.log(0.9 * 0.1 * 0.6 * 0.5), rel=1e-6)
    assert [(each.samples, each.accuracy) for each in evaluations.bins if each.samples] == [
        (1, 1.0),  # 0.5
        (1, 1.0),  # 0.6 = 9/15, which closes its bin
        (2, 0.5),  # 0.9 twice, right once
    ]
    assert evaluations.bins[8].samples == 1
    assert evaluations.calibration_error == pytest.approx((0.5 + 0.4 + 2 * 0.4) / 4)
    whole = Evaluation(evaluations, evaluations.by_class(["a", "b"]), b"", first=True)
    assert whole.mistakes(5) == [(1, "b", "a")]


def test_the_highest_losses_come_first_with_their_rows():
    """A loss that is no number is the highest; of equal ones, the first; noise has no rows."""
    losses = [0.5, 2.0, math.nan, 1.0, 0.0]
    logits = torch.tensor([[-math.log(math.expm1(loss)) if loss else 99.0, 0] for loss in losses])
    table, images = Table(2), torch.empty(5)
    labels = torch.zeros(5, dtype=torch.long)
    table.add(logits, Batch(images, labels, rows=torch.arange(10, 15)))
    table.add(logits, Batch(images, labels))
    scores = table.scores(Ranks(0, 1, 0, 1, CPU))
    assert scores.hardest(3) == [12, 11, 13] and scores.hardest(9) == [12, 11, 13, 10, 14]
    assert scores.remark.endswith("not finite for 2 images, counted as wrong: noise")


def test_two_ranks_count_what_one_does(evaluate, untrained, three, tmp_path):
    """Under torchrun the ranks share the samples; numbers and CSV are those of one process."""
    alone = evaluate(untrained, three, "--csv", tmp_path / "one.csv")
    args = ("-m", "rackrun.training", "evaluate", untrained, three, *ALONE, "--json")
    args = (*args, "--csv", tmp_path / "two.csv")
    ranks = warm.ranks(2, *args, stdout=subprocess.PIPE, cwd=warm.ROOT, env=dict(os.environ))
    first, second = [without_gloo(rank.communicate(timeout=300)[0]) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert second == ""
    together = json.loads(first)
    assert together.pop("loss") == pytest.approx(alone.pop("loss"), rel=1e-6)
    assert together["calibration_error"] == pytest.approx(alone["calibration_error"], rel=1e-5)
    for name in ("samples", "top1", "classes", "confusion"):
        assert together[name] == alone[name]
    lines = [
        [row[:4] for row in csv.reader((tmp_path / name).read_text().splitlines())]
        for name in ("one.csv", "two.csv")
    ]
    assert lines[0] == lines[1]


def test_data_with_some_of_the_classes_are_evaluated_by_name(untrained, make_shards, evaluate):
    """Whatever numbers the classes have there: a later test set may lack some of them."""
    data, names = make_shards(train=(2,), val=(9,), classes=2), ("cross", "disc")
    manifest = Manifest.parse((data / MANIFEST_NAME).read_bytes(), "here")
    renamed = replace(manifest, classes=tuple(names))
    (data / MANIFEST_NAME).write_bytes(renamed.serialize())
    outputs, labels, _ = answers_by_hand(untrained, data, flip=False)
    numbers = [SHAPES.index(names[label]) for label in labels]
    result = evaluate(untrained, data)
    assert result["top1"] == pytest.approx(float(np.mean(outputs.argmax(1) == numbers)))
    counted = {each["name"]: each["samples"] for each in result["classes"]}
    assert counted == {name: numbers.count(number) for number, name in enumerate(SHAPES)}


def test_tables_for_people(untrained, three, capsys):
    """The terminal has the sums, a line per class and the confusion matrix."""
    assert main([str(untrained), str(three), *ALONE]) == 0
    shown = capsys.readouterr().out
    assert "calibration error" in shown
    assert "label ↓ predicted →" in shown
    assert sum(line.startswith("cross") for line in shown.splitlines()) == 2


@pytest.mark.parametrize("images", ["cat.jpg", Path("cat.jpg"), [Path("cat.jpg")], b"GIF89a"])
def test_what_is_no_list_of_files_is_told_what_one_is(images, untrained):
    """A path as text would be a list of letters, and a file one of numbers."""
    with pytest.raises(TypeError, match="list of files.*read_bytes"):
        load_of_any_task(untrained).predict(images)
