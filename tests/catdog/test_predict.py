"""`python -m rackrun.catdog predict`: the predictions of a trained model on a user's images."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from rackrun.catdog.__main__ import main
from rackrun.catdog.drawing import draw, jpeg
from rackrun.errors import Problem
from rackrun.training import checkpoint
from tests.lab import warm

PROJECT = Path(__file__).parents[2]
SMALL = "--width 4 --image-size 32 --batch-size 4 --workers 0 --device cpu"


class Ended(NamedTuple):
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Ended]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `catdog predict` in this process: torch is loaded."""

    def run(*args: str | Path) -> Ended:
        try:
            code, error = main(["predict", *map(str, args)]), ""
        except Problem as problem:
            code, error = problem.exit_code, f"error: {problem}\n"
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err + error)

    return run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of one step on noise: weights of a real file that have learned nothing."""
    folder = tmp_path_factory.mktemp("run")
    run = (
        "-m",
        "rackrun.catdog",
        "--synthetic",
        "--epochs",
        "1",
        "--steps-per-epoch",
        "1",
        *SMALL.split(),
    )
    done = warm.run(*run, "--run-folder", folder, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def final(run_folder: Path) -> Path:
    return run_folder / "final.pt"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Return a folder with three images, one of them below it, and a file that is none."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    (folder / "a cat.jpg").write_bytes(jpeg("cat", 0, 0))
    (folder / "dog.PNG").touch()
    draw("dog", 0, 0).save(folder / "dog.PNG", "PNG")
    (folder / "more" / "gray.jpeg").touch()
    draw("cat", 0, 1).convert("L").save(folder / "more" / "gray.jpeg", "JPEG")
    (folder / "notes.txt").write_text("not a picture")
    return folder


def test_a_table_for_people(command, final, photos):
    """Each image has a line with its name, a class and a probability."""
    done = command(final, photos / "a cat.jpg", photos / "dog.PNG")
    assert (done.returncode, done.stderr) == (0, "")
    head, cat, dog = done.stdout.splitlines()
    assert head.split() == ["image", "class", "probability"]
    assert "a cat.jpg" in cat and "class " in cat and "%" in cat and "dog.PNG" in dog


def test_json_for_programs(command, final, photos):
    """--json prints one list: image, class, probability, and the classes with theirs."""
    done = command(final, photos / "a cat.jpg", "--json")
    (row,) = json.loads(done.stdout)
    assert row["image"] == str(photos / "a cat.jpg")
    assert row["class"] == max(row["classes"], key=row["classes"].get)
    assert row["probability"] == row["classes"][row["class"]]
    assert sum(row["classes"].values()) == pytest.approx(1, abs=1e-4)


def test_csv_has_the_likeliest_classes(command, final, photos, tmp_path):
    """--csv writes a row for each of --top-k classes of each image that can be read."""
    (photos / "empty.jpg").touch()
    table = tmp_path / "answers.csv"
    assert command(final, photos, "--csv", table, "--top-k", "2").returncode == 65
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    predictions = json.loads(command(final, photos, "--json", "--top-k", "2").stdout)
    expected = [
        (prediction["image"], str(rank), name, str(share))
        for prediction in predictions
        if "error" not in prediction
        for rank, (name, share) in enumerate(prediction["classes"].items(), start=1)
    ]
    assert [tuple(row.values()) for row in rows] == expected and len(rows) == 6
    assert command(final, photos, "--top-k", "0").stderr == "error: --top-k 0: not 1 or more\n"
    refused = command(final, photos, "--csv", tmp_path / "missing" / "answers.csv")
    assert refused.returncode == 64 and refused.stdout == ""


def test_folders_and_patterns(command, final, photos):
    """A folder stands for the images in and below it, a quoted pattern for what it matches."""
    rows = json.loads(command(final, photos, f"{photos}/*.jpg", "--json").stdout)
    names = [Path(row["image"]).name for row in rows]
    assert names == ["a cat.jpg", "dog.PNG", "gray.jpeg", "a cat.jpg"]
    (photos / "of" / "2026").mkdir(parents=True)
    (photos / "dog.PNG").rename(photos / "of" / "2026" / "dog.PNG")
    (row,) = json.loads(command(final, f"{photos}/**/*.PNG", "--json").stdout)
    assert row["image"] == str(photos / "of" / "2026" / "dog.PNG")


def test_batches_change_nothing(command, final, photos):
    """An image gets the same answer alone and among many more than a batch."""
    alone = json.loads(command(final, photos / "dog.PNG", "--json").stdout)[0]
    many = [photos / "a cat.jpg"] * 70 + [photos / "dog.PNG"]
    among = json.loads(command(final, *many, "--json").stdout)
    assert len(among) == 71
    assert among[-1]["classes"] == pytest.approx(alone["classes"], abs=1e-5)


def test_broken_images_are_named_after_the_others(command, final, photos):
    """What can be read is answered; every broken or missing one is a line, and the code is 65."""
    (photos / "cut.jpg").write_bytes(jpeg("cat", 0, 0)[:2000])
    (photos / "empty.jpg").touch()
    done = command(final, photos, photos / "missing.jpg")
    assert done.returncode == 65
    assert len(done.stdout.splitlines()) == 4
    errors = done.stderr.splitlines()
    assert [Path(line.split(": ")[1]).name for line in errors] == [
        "cut.jpg",
        "empty.jpg",
        "missing.jpg",
    ]
    assert errors[2].endswith("cannot be read: No such file or directory")
    rows = json.loads(command(final, photos / "empty.jpg", "--json").stdout)
    assert rows[0].keys() == {"image", "error"}


def test_a_checkpoint_of_the_run_will_do(command, run_folder, final, photos):
    """The best checkpoint is as good as final.pt, and says the same after the same step."""
    (best,) = (run_folder / "checkpoints").glob("step-*.pt")
    predictions = [json.loads(command(file, photos, "--json").stdout) for file in (final, best)]
    assert predictions[0] == predictions[1]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"task": "imagenet"}, "weights of imagenet, not of catdog; type "),
        ({"task": None}, "weights of an unknown task"),
        ({"config": {"future_option": 1}}, "future_option"),
        ({"model": {}}, "not a model that this version can build"),
        ({"task": "\x1b[2J\x1b]0;owned\x07"}, "weights of \u241b[2J\u241b]0;owned\u2407,"),
        ({"preparation": {"size": 10**9}}, "preparation.size: Expected `int` <= 8192"),
        ({"config": None}, "config: Expected `object`, got `null`"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(command, final, photos, tmp_path, change, what):
    """Weights of another task, model or version: one line that says so, and code 74."""
    other = tmp_path / "other.pt"
    checkpoint.write(other, checkpoint.read(final) | change)
    refused = command(other, photos)
    assert refused.returncode == 74
    assert refused.stderr.startswith(f"error: {other}: ")
    assert what in refused.stderr
    assert refused.stderr.count("\n") == 1
