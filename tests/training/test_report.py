"""The report: one page from what a run has left, however much that is."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rackrun.errors import DataError, UsageError
from tests import warm
from training.run import report

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run of three epochs with six predictions, one of them wrong."""
    folder = tmp_path / "20260102-030405-catdog"
    folder.mkdir()
    lines = [train(step) for step in range(10, 310, 10)] + [evaluate(epoch) for epoch in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.json").write_text(json.dumps({"recipe": "demo", "rate": 0.05, "data": ""}))
    save_predictions(folder)
    return folder


def train(step: int, **other: Any) -> dict[str, Any]:
    loss = math.exp(-step / 100)
    line = {"kind": "train", "step": step, "epoch": step / 100, "loss": loss, "rate": 0.01}
    return line | {"accuracy": 1 - loss / 2, "images_per_second": 800.0} | other


def evaluate(epoch: int, **other: Any) -> dict[str, Any]:
    line = {"kind": "evaluate", "step": 100 * epoch, "epoch": epoch, "split": "val", "loss": 0.5}
    return line | {"top1": 0.9 + epoch / 100, "top5": None, "samples": 400} | other


def save_predictions(folder: Path, count: int = 6, channels: int = 3, **other: Any) -> None:
    random = np.random.default_rng(0)
    parts = {
        "images": random.integers(256, size=(count, 20, 20, channels), dtype=np.uint8),
        "labels": np.arange(count) % 2,
        "predicted": np.where(np.arange(count) == 3, 0, np.arange(count) % 2),
        "probability": np.full(count, 0.75, np.float32),
        "classes": ["cat", "dog"],
    }
    np.savez(folder / "predictions.npz", **(parts | other))


def words(folder: Path) -> list[str]:
    """Return every text on the page."""
    found: list[str] = []
    figure = report.drawn(report.read_story(folder))
    for part in [*figure.subfigs]:
        found += [text.get_text() for text in part.texts]
        for axes in part.axes:
            found += [text.get_text() for text in axes.texts]
    return [text for text in found if text]


def test_a_run_becomes_a_page(run: Path) -> None:
    """write() puts a readable PNG into the folder and says where it is."""
    page = report.write(run)
    assert page == run / "report.png"
    with Image.open(page) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 800
        assert len(picture.convert("RGB").getcolors(2**24)) > 100


def test_the_page_shows_the_results(run: Path) -> None:
    """Name, settings, accuracy, speed, and what was said about each image are on the page."""
    text = words(run)
    assert {"20260102-030405-catdog", "recipe demo   lr 0.05", "93.0%", "800"} <= set(text)
    assert "of 400 validation images correct" in text
    assert any("Predictions on 6 validation images: 5 correct" in line for line in text)
    assert text.count("cat 75%") == 3
    assert "cat 75%, is dog" in text


def test_the_last_accuracy_is_not_taken_for_the_best(run: Path) -> None:
    """After a fall both are shown: what final.pt reaches, and what was reached before."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(evaluate(4, top1=0.5, top5=0.99)) + "\n")
    text = words(run)
    assert {"50.0%", "99.0%", "93.0%", "at best, after epoch 3"} <= set(text)


@pytest.mark.parametrize("missing", ["config.json", "predictions.npz"])
def test_a_part_may_be_missing(run: Path, missing: str) -> None:
    """A run without a grid or without settings has a page all the same."""
    (run / missing).unlink()
    assert report.write(run).stat().st_size > 10_000


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [train(1, loss=math.nan), evaluate(1)],
        *(
            pytest.param(few, marks=pytest.mark.long)
            for few in ([train(1)], [train(1), train(2)], [evaluate(1)])
        ),
    ],
    ids=["none", "no number", "one", "two", "only validation"],
)
def test_a_page_of_few_points(run: Path, lines: list[dict[str, Any]]) -> None:
    """A run that has just begun has a page, as has one whose loss was no number."""
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report.write(run).stat().st_size > 10_000


def test_a_line_that_was_cut_short_is_left_out(run: Path) -> None:
    """A run that was killed while writing its last line has a page of the others."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert len(report.read_story(run).train) == 30


def test_gray_images_and_long_names(run: Path) -> None:
    """One channel is shown as gray; a long class name is cut to fit below its image."""
    save_predictions(run, channels=1, classes=["Egyptian cat, tabby", "English foxhound dog"])
    assert "Egyptian cat 75%, is English foxho…" in words(run)
    report.write(run)


@pytest.mark.parametrize(
    "name", [r"a$\frac{", "\x1b[31mtwo\nlines", pytest.param("\u732b", marks=pytest.mark.long)]
)
def test_a_class_may_be_called_anything(run: Path, name: str) -> None:
    """Names are text, and not the mathematics that matplotlib makes of a pair of dollars."""
    save_predictions(run, classes=[name, "dog"])
    config = {"recipe": name, "data": f"/{name}/{name}"}
    (run / "config.json").write_text(json.dumps(config))
    report.write(run)
    assert all(text.isprintable() for text in words(run))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", "not json\n"),
        ("metrics.jsonl", '{"kind": "train", "step": 1}\n'),
        ("metrics.jsonl", '{"kind": "other"}\n'),
        ("metrics.jsonl", "[]\n"),
        ("metrics.jsonl", json.dumps(train(1, loss="low")) + "\n"),
        ("config.json", "{"),
        ("config.json", "[]"),
        ("predictions.npz", "not an archive"),
        ("predictions.npz", ""),
    ],
)
def test_a_file_that_cannot_be_understood_is_named(run: Path, name: str, content: str) -> None:
    """A damaged file is one clear line with its path, and no page is written."""
    (run / name).write_text(content)
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        report.write(run)
    assert not (run / "report.png").exists()


@pytest.mark.parametrize(
    "other",
    [
        {"images": np.zeros((6, 20), np.uint8)},
        {"labels": np.zeros(5, np.int64)},
        {"predicted": np.full(6, 2)},
        {"classes": np.array([{}], object)},
    ],
    ids=["shape", "count", "class", "pickled"],
)
def test_a_grid_that_does_not_fit_is_refused(run: Path, other: dict[str, Any]) -> None:
    """Predictions that contradict themselves are named; nothing is unpickled."""
    save_predictions(run, **other)
    with pytest.raises(DataError, match=r"predictions\.npz: not a grid of predictions"):
        report.write(run)


def test_another_folder_is_refused(tmp_path: Path) -> None:
    """A folder without metrics is not a run, and the message says so."""
    with pytest.raises(UsageError, match="not the folder of a run"):
        report.write(tmp_path)


def test_smoothing_keeps_ends_and_means() -> None:
    """A straight line stays one, from its first point to its last."""
    line = np.linspace(3, 5, 100)
    assert report.smoothed(line) == pytest.approx(line)
    assert report.smoothed(np.array([1.0, 0, 1, 0])).tolist() == [1, 0, 1, 0]


def test_the_command_draws_a_page(run: Path) -> None:
    """`python -m training.run.report RUN` prints where the page is; without RUN, what to type."""
    command = ("-m", "training.run.report")
    drawn = warm.run(*command, run, cwd=PROJECT)
    assert (drawn.returncode, drawn.stdout) == (0, f"{run}/report.png\n")
    refused = warm.run(*command, cwd=PROJECT)
    assert refused.returncode == 64
    assert refused.stderr.startswith("error: type python -m training.run.report RUN")
