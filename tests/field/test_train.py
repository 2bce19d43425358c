"""What people met when they trained and predicted; each test is a kind, after public reports."""

import csv
import json
import shutil
from argparse import Namespace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.lab import own_models
from tests.lab.run import Result, write
from tests.lab.sources import made_by

FROM = "--weights '{}' --image-size 32 --device cpu --workers 0 --patience 0"
SMALL = FROM.format("")
COLORS = ("red", "green", "blue")


@pytest.fixture
def project(tmp_path):
    """Return a folder with own models, pictures of three colors, and their shards."""
    shutil.copy(own_models.__file__, tmp_path / "models.py")
    draw(tmp_path / "set")
    return tmp_path


@pytest.fixture
def shards(project):
    made = made_by("rackrun convert folder set shards", name="shards", set=draw)
    return write(project, {"shards": made}) / "shards"


def draw(folder: Path, count: int = 14) -> None:
    noise = np.random.default_rng(0)
    for channel, color in enumerate(COLORS):
        (folder / color).mkdir(parents=True)
        for number in range(count):
            pixels = noise.normal(80, 30, (48, 48, 3))
            pixels[..., channel] += 100
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            image.save(folder / color / f"{color}{number:02d}.png")


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


@pytest.mark.parametrize(
    ("model", "more", "code", "says"),
    [
        ("View", "", 1, "--channels-last off"),
        ("OfOtherSize", "", 1, "images are 3 x 32 x 32, by --image-size"),
        ("Unused", "", 64, "--freeze old_head"),
        ("WeightNormed", "--ema-decay 0.9", 1, "--ema-decay"),
        ("Held", "--ema-decay 0.9", 1, "--ema-decay"),
        ("Unsaved", "", 1, "models:Unsaved"),
        ("Misfit", "", 1, "models:Misfit"),
        ("Dictionary", "", 64, "return a tensor"),
    ],
)
def test_what_no_rank_could_train_is_refused_before_a_host_is_touched(
    model, more, code, says, cli, shards
):
    launcher = "--dry-run --nproc 2" if model == "Unused" else "--dry-run"
    result = train(cli, model, more, launcher=launcher)
    assert (result.code, says in last(result)) == (code, True), result


@pytest.mark.parametrize(
    ("model", "more"),
    [("View", "--channels-last off"), ("Unused", ""), ("Lazy", ""), ("WeightNormed", "")],
)
def test_what_one_rank_can_train_is_not_refused(model, more, cli, shards):
    assert train(cli, model, more, launcher="--dry-run").code == 0


@pytest.mark.parametrize(("model", "more"), [("Lazy", "--ema-decay 0.9"), ("Held", "")])
def test_models_of_all_kinds_train(model, more, cli, shards):
    result = train(cli, model, f"--epochs 1 {more}")
    assert result.code == 0, result


def test_a_rank_blames_a_model_for_what_torch_refuses(cli, shards):
    line = "python -m rackrun.training classify --data shards --model models:Misfit --epochs 1"
    result = cli(f"{line} {SMALL}")
    assert (result.code, "--model models:Misfit" in last(result)) == (1, True), result


@pytest.mark.parametrize(
    ("model", "more", "said"),
    [("Softmax", "", True), ("Sigmoid", "--precision bf16", True), ("Small", "", False)],
)
def test_a_model_that_ends_in_probabilities_is_remarked(model, more, said, cli, shards):
    result = train(cli, model, f"--epochs 1 {more}")
    assert ("as of a softmax or sigmoid" in result.said) == said, result


def test_the_normalization_of_a_model_can_be_given_and_is_said(cli, shards):
    result = train(cli, "Small", "--epochs 1 --mean 0.5,0.5,0.5 --std 0.5 --short-side 40")
    assert result.code == 0, result
    first = result.said.partition("epoch 1")[0]
    assert "32 of 40 px" in first and "mean 0.5,0.5,0.5, std 0.5,0.5,0.5" in first, result


def test_a_layer_that_a_rank_skips_at_times_is_named(cli, shards):
    more = "--epochs 3 --batch-size 4"
    result = train(cli, "SkippedByOneRank", more, launcher="--nproc 2")
    assert (
        result.code,
        "--model models:SkippedByOneRank: forward does not use" in last(result),
    ) == (
        1,
        True,
    ), result


# Numbers that are none


def test_an_image_that_makes_the_first_loss_nan_is_named(cli, project):
    black(project / "set" / "red" / "lens_cap.png")
    assert cli("rackrun convert folder set shards").code == 0
    result = train(cli, "Standardised", "--epochs 3 --batch-size 40")
    assert result.code == 76, result
    assert "lens_cap" in "".join(result.err.splitlines()[-2:]), result


def test_numbers_that_are_nan_never_become_predictions_or_json(cli, project):
    for color in COLORS:
        (project / "split" / "val" / color).mkdir(parents=True)
        shutil.copytree(project / "set" / color, project / "split" / "train" / color)
        for path in sorted((project / "split" / "train" / color).iterdir())[:4]:
            path.rename(project / "split" / "val" / color / path.name)
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
    judged = strict(cli(f"rackrun evaluate runs/latest shards --csv rows.csv --json {model}").out)
    assert (judged["samples"], sum(map(sum, judged["confusion"]))) == (13, 12)
    rows = {
        row["key"]: row for row in csv.DictReader((project / "rows.csv").read_text().split("\n"))
    }
    assert (len(rows), rows["red_lens_cap"]["prediction"]) == (13, "")


# Images are seen alike in training and prediction


def draw_grays(folder: Path) -> None:
    """Draw squares of one color: dark or light, which gray shows and the channels hide."""
    noise, counts = np.random.default_rng(1), {"dark": 0, "light": 0}
    while min(counts.values()) < 40:
        color = noise.integers(0, 256, 3)
        luma = color @ np.array([0.299, 0.587, 0.114])
        kind = "dark" if 60 < luma < 100 else "light" if 140 < luma < 180 else ""
        if kind and counts[kind] < 40 and np.ptp(color) >= 120:
            pixels = np.clip(color + noise.normal(0, 10, (80, 80, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / kind / f"{counts[kind]:02d}.png")
            counts[kind] += 1


def draw_margins(folder: Path) -> None:
    """Draw wide images that differ in their left margin alone, which a crop cuts off."""
    noise = np.random.default_rng(1)
    for kind, channel in (("dark", 0), ("light", 2)):
        for number in range(40):
            pixels = noise.normal(100, 10, (40, 160, 3))
            pixels[:, :30, channel] += 120
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            image.save(folder / kind / f"{number:02d}.png")


@pytest.mark.parametrize(("draw_all", "option"), [(draw_grays, "gray"), (draw_margins, "size 40")])
def test_predictions_repeat_what_the_conversion_changed(draw_all, option, cli, project):
    for kind in ("dark", "light"):
        (project / "images" / kind).mkdir(parents=True)
    draw_all(project / "images")
    assert cli(f"rackrun convert folder images shards --{option}").code == 0
    assert train(cli, "Small", "--epochs 20 --lr 1e-2 --batch-size 16").code == 0
    line = "rackrun predict runs/latest images/dark images/light --csv out.csv"
    assert cli(f"{line} --model models:Small").code == 0
    table = csv.DictReader((project / "out.csv").read_text().splitlines())
    rows = [row for row in table if row["rank"] == "1"]
    right = sum(row["class"] == Path(row["image"]).parent.name for row in rows)
    assert (len(rows), right >= 72) == (80, True), right


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ("--gray", "--size 40", "--gray --size 40"),
        ("--size 40", "--short-side 20", "--size 20"),
        ("--short-side 24", "--short-side 40 --gray", "--gray --short-side 24"),
        ("--gray --quality 80", "", "--gray --quality 80"),
    ],
)
def test_the_changes_of_two_conversions_are_repeated(first, second, both, cli, project):
    assert cli(f"rackrun convert folder set first {first}").code == 0
    assert cli(f"rackrun convert shards first second {second}").code == 0
    result = train(cli, "Small", "--epochs 1", data="second")
    assert f"converted with {both}\n" in result.said, result


def test_an_image_of_12_of_16_bits_is_named_as_dark(cli, shards, project):
    assert train(cli, "Small", "--epochs 1").code == 0
    levels = np.arange(1600, dtype=np.uint16).reshape(40, 40)
    Image.fromarray(levels).save(project / "dark.png")
    result = cli("rackrun predict runs/latest dark.png set/red --model models:Small")
    assert (result.code, "dark.png" in last(result)) == (0, True), result


def test_a_folder_is_predicted_without_what_systems_put_there(cli, shards, project):
    assert train(cli, "Small", "--epochs 1").code == 0
    image = (project / "set" / "red" / "red00.png").read_bytes()
    litter = ("@eaDir/a.png/SYNOFILE_THUMB_M.png", ".hidden/b.png", "._a.png", "#recycle/c.png")
    write(project, {f"new/{name}": image for name in ("a.png", "deeper/d.png", *litter)})
    result = cli("rackrun predict runs/latest new --model models:Small --json")
    assert result.code == 0, result
    assert [row["image"] for row in strict(result.out)] == ["new/a.png", "new/deeper/d.png"]


# Other classes


def test_a_test_set_with_fewer_classes_is_evaluated_by_their_names(cli, shards, project):
    assert train(cli, "Small", "--epochs 2 --lr 1e-2").code == 0
    for color in ("red", "blue"):
        shutil.copytree(project / "set" / color, project / "new" / color)
    assert cli("rackrun convert folder new newshards --val-percent 0").code == 0
    line = "rackrun evaluate runs/latest newshards --split train --model models:Small"
    result = cli(line)
    assert result.code == 0, result


def test_rows_of_other_classes_are_not_kept_without_a_word(cli, shards, project):
    assert train(cli, "Small", "--epochs 2 --lr 1e-2", launcher="--name one").code == 0
    for color, name in zip(COLORS, ("a_red", "c_green", "b_blue"), strict=True):
        shutil.copytree(project / "set" / color, project / "other" / name)
    assert cli("rackrun convert folder other others").code == 0
    weights = next((project / "runs").glob("*one*")) / "final.pt"
    line = "rackrun local --plain classify --data others --model models:Small --recipe probe"
    result = cli(f"{line} {FROM.format(weights)} --epochs 1")
    assert result.code == 0, result
    said = [line for line in result.said.splitlines() if line.startswith("weights")]
    assert "reinitialized" in said[0] or "classes" in said[0], said


def test_what_is_left_out_by_only_classes_is_said(cli, shards):
    result = train(cli, "Small", "--epochs 1 --only-classes red,blue")
    assert result.code == 0, result
    assert "of each class" not in result.said


def test_without_validation_the_accuracy_of_a_run_is_that_of_its_last_epoch(cli, project):
    """Not that of its last step, which had two images."""
    assert cli("rackrun convert folder set shards --val-percent 0").code == 0
    result = train(cli, "Small", "--epochs 1 --batch-size 8", launcher="--name one")
    (file,) = project.glob("runs/*-one/result.json")
    accuracy = json.loads(file.read_text())["report"]["accuracy"]
    assert result.code == 0 and f"\ntraining accuracy {accuracy:.2%}  " in result.said, result


def test_an_accuracy_that_one_answer_reaches_is_said_before_the_training(cli, project):
    for number in range(5, 14):
        for color in COLORS[1:]:
            (project / "set" / color / f"{color}{number:02d}.png").unlink()
    draw(project / "more", count=40)
    for path in (project / "more" / "red").iterdir():
        path.rename(project / "set" / "red" / f"more-{path.name}")
    assert cli("rackrun convert folder set shards --val-percent 20").code == 0
    result = train(cli, "Small", "--epochs 1")
    first = result.said.partition("epoch 1/1")[0]
    assert result.code == 0 and "% if all answers are red" in first, result


def test_a_split_that_lacks_classes_is_named(cli, project):
    for color in COLORS:
        shutil.copytree(project / "set" / color, project / "split" / "train" / color)
    shutil.copytree(project / "set" / "red", project / "split" / "val" / "red")
    for number, path in enumerate((project / "split" / "val" / "red").iterdir()):
        Image.new("RGB", (48, 48), (200, number, 0)).save(path)
    result = cli("rackrun convert folder split shards")
    assert result.code == 0, result
    assert "green" in result.said and "blue" in result.said, result


def test_a_folder_of_images_that_was_moved_has_the_shards_that_its_runs_know(cli, project):
    """Its name is part of theirs, so that of others no run could be resumed."""
    said = cli("rackrun local --dry-run classify --data set").said
    made = Path(said.partition("set: images, converted once, to ")[2].split()[0])
    assert cli(f"rackrun convert folder set {made}").code == 0
    (project / "set").rename(project / "moved")
    assert f"moved: images, converted before, to {made}\n" in (
        cli("rackrun local --dry-run classify --data moved").said
    )


def test_a_checkpoint_of_the_latest_run_is_resumed_although_the_link_moves(cli, shards, project):
    assert train(cli, "Small", "--epochs 2").code == 0
    checkpoint = max((project / "runs" / "latest" / "checkpoints").glob("*.pt"))
    where = checkpoint.relative_to(project)
    result = train(cli, "Small", f"--epochs 3 --resume {where}")
    assert result.code == 0, result
    assert "epoch 3" in result.said and "epoch 1" not in result.said, result


def test_a_run_that_keeps_its_images_per_step_says_so_where_others_are_typed(cli, shards):
    assert train(cli, "Small", "--epochs 1 --batch-size 8").code == 0
    result = train(cli, "Small", "--epochs 2 --batch-size 4 --resume latest")
    assert result.code == 0, result
    assert "--batch-size 4 here, 8 in the checkpoint" in result.said
    assert "the run keeps its 8 images per step" in result.said


def test_a_table_of_predictions_replaces_an_earlier_one(cli, shards, project):
    assert train(cli, "Small", "--epochs 1").code == 0
    for images, rows in (("set/red", 14), ("set/red set/blue", 28)):
        line = f"rackrun predict runs/latest {images} --csv out.csv --top-k 1"
        assert cli(f"{line} --model models:Small").code == 0
        assert len((project / "out.csv").read_text().splitlines()) == rows + 1


# Weights of other programs


@pytest.mark.parametrize(
    ("key", "model"),
    [("model_state_dict", "Small"), ("net", "Small"), ("module", "Small"), ("", "Wrapped")],
)
def test_weights_of_any_program_predict_without_a_run(key, model, cli, project):
    import torch

    state = own_models.Small(3).state_dict()
    args = Namespace(lr=0.1, out=Path("runs"), began=datetime(2026, 1, 1))
    beside = {"epoch": 7, "args": args, "top1": np.float64(76.1)}
    saved = {key: state, **beside} if key else state
    if key == "module":
        saved = {f"module.{name}": value for name, value in state.items()}
    torch.save(saved, project / "weights.pth")
    (project / "classes.txt").write_text("blue\ngreen\nred\n")
    how = f"--weights weights.pth --model models:{model} --classes classes.txt --image-size 32"
    result = cli(f"rackrun predict {how} set/red/red00.png --json")
    assert result.code == 0, result
    assert sorted(strict(result.out)[0]["classes"]) == ["blue", "green", "red"]


def test_rows_follow_the_classes_that_a_file_of_imagefolder_names(cli, project):
    import torch

    numbers = {"red": 0, "green": 1, "blue": 2}
    model = own_models.Small(3)
    torch.save({"state_dict": model.state_dict(), "class_to_idx": numbers}, project / "w.pth")
    (project / "classes.txt").write_text("blue\ngreen\nred\n")
    how = "--weights w.pth --model models:Small --classes classes.txt --image-size 32"
    result = cli(f"rackrun predict {how} set/red/red00.png")
    assert result.code == 0 and "rows of 3 of 3 classes by name" in result.err, result


def test_published_weights_are_used_as_they_are(cli, shards, project):
    assert train(cli, "Small", "--epochs 1 --mean 0.4 --std 0.2").code == 0
    (project / "classes.txt").write_text("blue\ngreen\nred\n")
    assert cli("rackrun export runs/latest w.safetensors --model models:Small").code == 0
    how = "--weights w.safetensors --model models:Small --image-size 32 --mean 0.4 --std 0.2"
    for line in ("predict {} set/red --json", "evaluate {} shards --json"):
        published = cli("rackrun " + line.format(f"{how} --classes classes.txt"))
        assert published.code == 0, published
        assert "32 of 37 px, mean 0.4,0.4,0.4, std 0.2,0.2,0.2" in published.err
        unnamed = cli("rackrun " + line.format("runs/latest"))
        assert (unnamed.code, "--model models:Small" in last(unnamed)) == (74, True), unnamed
        own = cli("rackrun " + line.format("runs/latest --model models:Small"))
        assert strict(published.out) == strict(own.out)
    assert cli(f"rackrun export {how} --classes classes.txt out.onnx").code == 0
    (project / "classes.txt").write_text("blue\ngreen\nred\ngray\n")
    refused = cli(f"rackrun predict {how} --classes classes.txt set/red")
    assert (refused.code, "--classes" in last(refused)) == (74, True), refused


def test_an_export_says_its_classes_and_normalization_to_whoever_uses_it(cli, shards, project):
    assert train(cli, "Small", "--epochs 2 --lr 1e-2 --mean 0.4 --std 0.2").code == 0
    assert cli("rackrun export runs/latest w.safetensors --model models:Small").code == 0
    (project / "classes.txt").write_text("red\ngreen\nblue\n")
    how = "--weights w.safetensors --model models:Small --image-size 32 --classes classes.txt"
    mine = cli("rackrun predict runs/latest set/red --model models:Small --json")
    assert strict(mine.out)
    same = cli(f"rackrun predict {how} --mean 0.4 --std 0.2 set/red --json")
    assert "rows of 3 of 3 classes by name" in same.err, same
    best = [[row["class"] for row in strict(each.out)] for each in (mine, same)]
    assert best[0] == best[1]
    other = cli(f"rackrun predict {how} set/red")
    assert "type --mean 0.4,0.4,0.4 --std 0.2,0.2,0.2" in other.err, other


def test_models_are_listed_as_they_were_published(cli):
    result = cli("rackrun models vit_b_16")
    assert result.out.splitlines()[1].split() == ["vit_b_16", "86.6", "M", "224", "81.1%"], result
    assert "timm:vit_base_patch16_224\n" in cli("rackrun models 'timm:vit_base*'").out


# Pages


def test_the_page_on_digits_says_which_way_round_they_are():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "mnist.md").read_text()
    assert "white on black" in page.lower() or "black background" in page.lower()
