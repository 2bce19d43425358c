"""MNIST from its IDX files to a trained network, on real digits of scikit-learn."""

import difflib
import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from rackrun.convert.__main__ import main
from rackrun.mnist.model import TASK
from rackrun.mnist.recipes import Mnist
from rackrun.shards.open import open_source
from rackrun.training.data.decode import decode
from tests.lab import warm
from tests.lab.data import digits, everything, mnist
from tests.lab.run import write

ROOT = Path(__file__).parents[2]
BEFORE, AFTER = (ROOT / "examples" / "mnist" / name for name in ("before.py", "after.py"))
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def convert(folder: Path, out: Path) -> Path:
    main(["mnist", str(folder), str(out), "--workers", "1"])
    return out


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzipped"])
def test_every_pixel_and_label_arrives(tmp_path, packed, capsys):
    """The pixels of each image are those of the files, in the right split; 60,000 are missed."""
    out = convert(write(tmp_path / "raw", mnist(40, 20, packed)), tmp_path / "out")
    assert "40 and 20 images; MNIST has 60,000 and 10,000" in capsys.readouterr().err
    images, labels = digits()
    source = open_source(str(out))
    assert source.manifest.classes == tuple("0123456789")
    assert not source.manifest.report
    for split, prefix, first, count in (("train", "train", 0, 40), ("test", "t10k", 1437, 20)):
        result = everything(source, split)
        assert len(result) == count
        for sample in result:
            row = first + int(sample.key.removeprefix(f"{prefix}_"))
            assert sample.label == labels[row]
            assert np.array_equal(decode(sample.image)[:, :, 0], images[row])


def test_network_and_recipe_are_the_published_ones():
    """Plain momentum and one learning rate, 93,322 parameters."""
    recipe = Mnist()
    assert sum(weight.numel() for weight in TASK.model(recipe, 10).parameters()) == 93_322
    rule = (recipe.optimizer, recipe.lr, recipe.momentum, recipe.nesterov, recipe.weight_decay)
    assert rule == ("sgd", 0.01, 0.9, False, 0.0)
    assert (recipe.lr_schedule, recipe.warmup_epochs, recipe.epochs) == ("constant", 0.0, 20)


def test_two_ranks_learn_real_digits(tmp_path):
    """Over 97 % of 360 unseen digits, judged on the test split, each image once over all ranks."""
    shards = convert(write(tmp_path / "raw", mnist()), tmp_path / "shards")
    args = ("--data", shards, "--run-folder", tmp_path / "run", "--epochs", 6, "--lr", 0.04)
    more = ("--lr-schedule", "cosine", "--batch-size", 16, "--device", "cpu", "--workers", 0)
    job = warm.ranks(
        2,
        *("-m", "rackrun.mnist", *map(str, (*args, *more)), "--no-tensorboard"),
        env={"PATH": os.environ["PATH"], **ENVIRONMENT},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    outputs = [rank.communicate()[0] for rank in job]
    assert [rank.returncode for rank in job] == [0, 0], outputs
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    *_, last = (line for line in lines if line["kind"] == "evaluate")
    assert (last["split"], last["samples"]) == ("test", 360)
    assert last["top1"] > 0.97
    assert f"test accuracy {last['top1']:.2%}" in outputs[0]


def test_the_page_shows_every_changed_line():
    """docs/guides/mnist.md holds the difference of the two scripts, but for their imports."""
    bodies = [path.read_text().split("\nfolder, ")[1].splitlines() for path in (BEFORE, AFTER)]
    changed = [line for line in difflib.ndiff(*bodies) if line[:2] in ("- ", "+ ")]
    page = (ROOT / "docs" / "guides" / "mnist.md").read_text()
    (block,) = re.findall(r"^```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert [line.rstrip() for line in changed] == block.splitlines()
