"""What people met when they trained and predicted; each test is a kind, after public reports."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.lab import own_models
from tests.lab.run import Result

FROM = "--weights '{}' --image-size 32 --device cpu --workers 0 --patience 0"
SMALL = FROM.format("")
COLOURS = ("red", "green", "blue")


@pytest.fixture
def project(tmp_path):
    """Return a folder with own models, pictures of three colours, and their shards."""
    shutil.copy(own_models.__file__, tmp_path / "models.py")
    draw(tmp_path / "set")
    return tmp_path


@pytest.fixture
def shards(project, cli):
    assert cli("rackrun convert folder set shards").code == 0
    return project / "shards"


def draw(folder: Path, count: int = 14) -> None:
    noise = np.random.default_rng(0)
    for channel, colour in enumerate(COLOURS):
        (folder / colour).mkdir(parents=True)
        for number in range(count):
            pixels = noise.normal(80, 30, (48, 48, 3))
            pixels[..., channel] += 100
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            image.save(folder / colour / f"{colour}{number:02d}.png")


def black(path: Path) -> None:
    Image.new("RGB", (48, 48)).save(path)


def train(cli, model: str, more: str = "", data: str = "shards", launcher: str = "") -> Result:
    line = f"rackrun local --plain {launcher} classify --data {data} --model models:{model} {SMALL}"
    return cli(f"{line} {more}")


def last(result: Result) -> str:
    return result.err.strip().splitlines()[-1]


def strict(text: str) -> object:
    """Return what JSON says; ValueError for NaN, which JSON does not have."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


# Own models


def test_a_model_that_views_its_features_trains_or_is_told_the_option(cli, shards):
    result = train(cli, "View", "--epochs 1")
    assert result.code == 0 or "--channels-last" in last(result), result


def test_a_layer_that_is_not_used_is_named_or_trains_on_two_ranks(cli, shards):
    result = train(cli, "Unused", "--epochs 1 --batch-size 8", launcher="--nproc 2")
    assert result.code == 0 or (result.code != 70 and "old_head" in last(result)), result


@pytest.mark.parametrize(("model", "more"), [("Lazy", ""), ("WeightNormed", "--ema-decay 0.9")])
def test_what_torch_refuses_of_a_model_is_no_internal_error(model, more, cli, shards):
    result = train(cli, model, f"--epochs 1 {more}")
    assert result.code == 0 or (result.code != 70 and "models:" in last(result)), result


def test_a_model_that_ends_in_a_softmax_is_remarked(cli, shards):
    result = train(cli, "Softmax", "--epochs 1")
    assert "softmax" in result.said.lower(), result


def test_the_normalisation_of_a_model_can_be_given_and_is_said(cli, shards):
    result = train(cli, "Small", "--epochs 1 --mean 0.5,0.5,0.5 --std 0.5,0.5,0.5")
    assert result.code == 0, result
    assert "0.5" in result.said.partition("epoch 1")[0], result


# Numbers that are none


def test_an_image_that_makes_the_first_loss_nan_is_named(cli, project):
    black(project / "set" / "red" / "lens_cap.png")
    assert cli("rackrun convert folder set shards").code == 0
    result = train(cli, "Standardised", "--epochs 3 --batch-size 40")
    assert result.code not in (0, 70), result
    assert "lens_cap" in "".join(result.err.splitlines()[-2:]), result


def test_numbers_that_are_nan_never_become_predictions_or_json(cli, project):
    for colour in COLOURS:
        (project / "split" / "val" / colour).mkdir(parents=True)
        shutil.copytree(project / "set" / colour, project / "split" / "train" / colour)
        for path in sorted((project / "split" / "train" / colour).iterdir())[:4]:
            path.rename(project / "split" / "val" / colour / path.name)
    black(project / "split" / "val" / "red" / "lens_cap.png")
    assert cli("rackrun convert folder split shards").code == 0
    trained = train(cli, "Standardised", "--epochs 1")
    assert trained.code == 0, trained
    assert "lens_cap" in trained.said
    for line in (project / "runs" / "latest" / "metrics.jsonl").read_text().splitlines():
        strict(line)
    model = "--model models:Standardised"
    for path in ("split/val/red", "split/val/red/lens_cap.png --json"):
        result = cli(f"rackrun predict runs/latest {path} {model}")
        assert result.code != 70, result
        if "--json" in path:
            strict(result.out)
    strict(cli(f"rackrun evaluate runs/latest shards --json {model}").out)


# Images are seen alike in training and prediction


def test_predictions_repeat_what_the_conversion_changed_or_say_that_they_do_not(cli, project):
    noise, counts = np.random.default_rng(1), {"dark": 0, "light": 0}
    for kind in counts:
        (project / "gray" / kind).mkdir(parents=True)
    while min(counts.values()) < 40:
        colour = noise.integers(0, 256, 3)
        luma = colour @ np.array([0.299, 0.587, 0.114])
        kind = "dark" if 60 < luma < 100 else "light" if 140 < luma < 180 else ""
        if kind and counts[kind] < 40 and np.ptp(colour) >= 120:
            pixels = np.clip(colour + noise.normal(0, 10, (80, 80, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(project / "gray" / kind / f"{counts[kind]:02d}.png")
            counts[kind] += 1
    assert cli("rackrun convert folder gray shards --gray").code == 0
    assert train(cli, "Small", "--epochs 20 --lr 1e-2 --batch-size 16").code == 0
    line = "rackrun predict runs/latest gray/dark gray/light --csv out.csv --model models:Small"
    assert cli(line).code == 0
    table = csv.DictReader((project / "out.csv").read_text().splitlines())
    rows = [row for row in table if row["rank"] == "1"]
    right = sum(row["class"] == Path(row["image"]).parent.name for row in rows)
    assert (len(rows), right >= 72) == (80, True), right


# Other classes


def test_a_test_set_with_fewer_classes_is_evaluated_by_their_names(cli, shards, project):
    assert train(cli, "Small", "--epochs 2 --lr 1e-2").code == 0
    for colour in ("red", "blue"):
        shutil.copytree(project / "set" / colour, project / "new" / colour)
    assert cli("rackrun convert folder new newshards --val-percent 0").code == 0
    line = "rackrun evaluate runs/latest newshards --split train --model models:Small"
    result = cli(line)
    assert result.code == 0, result


def test_rows_of_other_classes_are_not_kept_without_a_word(cli, shards, project):
    assert train(cli, "Small", "--epochs 2 --lr 1e-2", launcher="--name one").code == 0
    for colour, name in zip(COLOURS, ("a_red", "c_green", "b_blue"), strict=True):
        shutil.copytree(project / "set" / colour, project / "other" / name)
    assert cli("rackrun convert folder other others").code == 0
    weights = next((project / "runs").glob("*one*")) / "final.pt"
    line = "rackrun local --plain classify --data others --model models:Small --recipe probe"
    result = cli(f"{line} {FROM.format(weights)} --epochs 1")
    assert result.code == 0, result
    said = [line for line in result.said.splitlines() if line.startswith("weights")]
    assert "afresh" in said[0] or "classes" in said[0], said


def test_what_is_left_out_by_only_classes_is_said(cli, shards):
    result = train(cli, "Small", "--epochs 1 --only-classes red,blue")
    assert result.code == 0, result
    assert "of each class" not in result.said


def test_a_split_that_lacks_classes_is_named(cli, project):
    for colour in COLOURS:
        shutil.copytree(project / "set" / colour, project / "split" / "train" / colour)
    shutil.copytree(project / "set" / "red", project / "split" / "val" / "red")
    for number, path in enumerate((project / "split" / "val" / "red").iterdir()):
        Image.new("RGB", (48, 48), (200, number, 0)).save(path)
    result = cli("rackrun convert folder split shards")
    assert result.code == 0, result
    assert "green" in result.said and "blue" in result.said, result


def test_a_checkpoint_of_the_latest_run_is_resumed_although_the_link_moves(cli, shards, project):
    assert train(cli, "Small", "--epochs 2").code == 0
    checkpoint = max((project / "runs" / "latest" / "checkpoints").glob("*.pt"))
    where = checkpoint.relative_to(project)
    result = train(cli, "Small", f"--epochs 3 --resume {where}")
    assert result.code == 0, result
    assert "epoch 3" in result.said and "epoch 1" not in result.said, result


# Weights of other programs


@pytest.mark.parametrize("key", ["model_state_dict", "net", "state_dict", "module"])
def test_weights_below_another_key_are_taken_or_the_keys_are_named(key, cli, shards, project):
    import torch

    state = own_models.Small(3).state_dict()
    if key == "module":
        saved = {f"module.{name}": value for name, value in state.items()}
    else:
        saved = {key: state, "epoch": 7, "lr": np.float64(0.1)}
    torch.save(saved, project / "weights.pth")
    line = "rackrun local --plain classify --data shards --model models:Small --epochs 1"
    result = cli(f"{line} {FROM.format('weights.pth')}")
    assert result.code == 0 or key in last(result), result


def test_published_weights_predict_without_a_run(cli, project):
    import torch

    torch.save(own_models.Small(3).state_dict(), project / "weights.pth")
    (project / "classes.txt").write_text("blue\ngreen\nred\n")
    how = "--weights weights.pth --model models:Small --classes classes.txt"
    result = cli(f"rackrun predict {how} --image-size 32 set/red/red00.png")
    assert result.code == 0, result


# Pages


def test_the_page_on_digits_says_which_way_round_they_are():
    page = (Path(__file__).parents[2] / "docs" / "howto" / "mnist.md").read_text()
    assert "white on black" in page.lower() or "black background" in page.lower()
