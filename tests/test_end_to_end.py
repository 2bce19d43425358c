"""From an archive of images to a model that knows unseen ones, as a user would do it."""

import io
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from PIL import Image

from rackrun.catdog.drawing import draw, jpeg
from rackrun.training import checkpoint
from tests.lab import warm
from tests.training.conftest import draw as shape

PROJECT = Path(__file__).parents[1]
IMAGES, EPOCHS = 300, 6
RECIPE = ["--recipe", "demo", "--epochs", str(EPOCHS), "--width", "8", "--image-size", "32"]
DEVICE = ["--device", "cpu", "--batch-size", "8"]


def command(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run one of our commands; it must exit with 0."""
    kind = warm.Launcher if args[0] == "launcher" else warm.Python
    done = warm.run("-m", f"rackrun.{args[0]}", *args[1:], start=kind, cwd=PROJECT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def images(count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield discs named as cats and crosses named as dogs, which are learned in seconds."""
    for number in range(count):
        yield (
            f"train/{('cat', 'dog')[number % 2]}.{number}.jpg",
            shape(2 * (number % 2), seed + number),
        )


def odd_pictures() -> dict[str, bytes]:
    """Return the odd files that archives of images hold besides proper ones."""
    cat, dog = draw("cat", 9, 0), draw("dog", 9, 0)
    rotated = Image.Exif()
    rotated[0x0112] = 6
    return {
        "train/cat.9001.jpg": jpeg("cat", 9, 1)[:3000],  # cut off
        "train/dog.9002.jpg": b"",
        "train/dog.9003.jpg": b"<html>404</html>",
        "train/cat.9004.jpg": saved(cat, "PNG"),
        "train/dog.9005.jpg": saved(dog.convert("CMYK"), "JPEG"),
        "train/cat.9006.jpg": saved(cat.convert("L"), "JPEG"),
        "train/dog.9007.jpg": saved(dog, "JPEG", exif=rotated),
    }


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the shards of an archive with some broken and odd images among good ones."""
    folder = tmp_path_factory.mktemp("end to end")
    with ZipFile(folder / "train.zip", "w") as archive:
        for name, content in (*images(IMAGES), *odd_pictures().items()):
            archive.writestr(name, content)
    command("convert", "catdog", folder / "train.zip", folder / "shards")
    return folder / "shards"


@pytest.fixture(scope="module")
def run(shards: Path) -> Path:
    """Return the folder of a run of two ranks that the launcher started on this machine."""
    return train(shards, shards.parent / "runs")


def train(shards: Path, runs: Path, *options: str | Path) -> Path:
    """Train with two ranks; the folder of the run."""
    task = ["catdog", *RECIPE, *DEVICE, "--data", shards, *options]
    python = ("--python", warm.interpreter())
    command("launcher", "local", "--nproc", "2", *python, "--runs", runs, *task)
    (folder,) = runs.glob("2*")
    return folder


def test_broken_images_are_left_out_and_named(shards):
    """The converter names every odd file, and leaves out those that are no images."""
    report = json.loads((shards / "report.json").read_text())
    names = {finding["file"]: finding["done"] for finding in report["findings"]}
    left_out = {name for name, done in names.items() if done == "left out"}
    assert names.keys() == odd_pictures().keys()
    assert left_out == {f"train/{name}.jpg" for name in ("cat.9001", "dog.9002", "dog.9003")}
    assert report["pictures"] == IMAGES + 4
    command("convert", "verify", shards)


def test_training_ends_with_everything(run):
    """A run of two ranks leaves its weights, its numbers, its page, and says that it is done."""
    result = json.loads((run / "result.json").read_text())
    assert (result["verdict"], result["codes"]) == ("done", {"0": 0, "1": 0})
    assert result["report"]["accuracy"] > 0.9
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "evaluate"]
    assert [line["epoch"] for line in evaluations] == list(range(1, EPOCHS + 1))
    assert evaluations[-1]["top1"] == pytest.approx(result["report"]["accuracy"], abs=1e-6)
    assert Path(result["report"]["report"]).read_text().startswith("<!")
    assert json.loads((run / "config.json").read_text())["recipe"] == "demo"


def test_the_model_knows_unseen_images(run, tmp_path):
    """`predict` is right about more than nine in ten unseen images."""
    for name, content in images(100, seed=10_000):
        (tmp_path / Path(name).name).write_bytes(content)
    text = json.loads(command("catdog", "predict", run / "final.pt", tmp_path, "--json").stdout)
    right = [Path(row["image"]).name.startswith(row["class"]) for row in text]
    assert len(right) == 100
    assert sum(right) > 90


def test_a_resumed_run_ends_in_the_same_weights(run, shards, tmp_path):
    """Going on from the last epoch but one leads to the same final weights, bit for bit."""
    earlier = tmp_path / "earlier"
    shutil.copytree(run, earlier)
    *_, last = sorted((earlier / "checkpoints").glob("step-*.pt"))
    last.unlink()
    resumed = train(shards, tmp_path / "runs", "--resume", earlier)
    first, second = (checkpoint.read(folder / "final.pt") for folder in (run, resumed))
    assert first["model"].keys() == second["model"].keys()
    for name, weights in first["model"].items():
        assert torch.equal(weights, second["model"][name]), name
