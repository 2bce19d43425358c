"""Predictions of a trained model for images, for every task.

    final.pt -> Trained
    files, folders, patterns -> paths -> Prediction, in the same order -> a table, or JSON

torch is imported only when there is something to predict, so that `--help` answers at once.
"""

import glob
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from rackrun.commandline.options import Examples, Positional, Values
from rackrun.commandline.parser import parse
from rackrun.commands import called
from rackrun.errors import DataError, UsageError
from rackrun.runs import final_weights
from rackrun.shards.litter import HIDDEN, system_folder
from rackrun.tables import require_folder, require_replaceable, table, write_table
from rackrun.terminal import clean, say
from rackrun.training.settings.model import ModelOptions, with_weights_first
from rackrun.units import first_few, plural

if TYPE_CHECKING:
    from rackrun.training.trained import Trained

SUFFIXES = (  # what a folder is searched for
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".pjpeg", ".pjp", ".mpo", ".png", ".gif", ".bmp", ".webp"),
    *(".tif", ".tiff", ".avif", ".heic", ".heif", ".ppm", ".pgm", ".pbm", ".pnm"),
)
PNG_DEPTH_AT = 24  # bytes
BATCH = 64  # images
COLUMNS = ("image", "rank", "class", "probability")


@dataclass(frozen=True)
class Predict:
    """Classify images with a trained model."""

    examples: ClassVar[Examples] = (
        ("{prog} runs/latest photos/", "classify the images of a folder"),
        ("{prog} runs/latest 'photos/*.jpg' --csv classes.csv", "write a table"),
        ("{prog} final.pt cat.jpg --top-k 3 --json", "print the likeliest classes"),
    )

    checkpoint: Positional[Path]
    """The weights: a run folder, its final.pt, or a checkpoint."""
    images: Positional[tuple[str, ...]]
    """Images, folders of images, or patterns such as 'photos/*.jpg'."""
    json: bool = False
    """Print JSON instead of a table."""
    csv: Annotated[str, Values("FILE")] = ""
    """Write a CSV file instead, with one row for each of the likeliest classes of each image."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto: a GPU if there is one."""
    model: ModelOptions = field(default_factory=ModelOptions)
    top_k: int = 5
    """Number of classes per image, likeliest first; the table shows only the first."""


@dataclass(frozen=True)
class Prediction:
    """Prediction for an image; the likeliest classes first."""

    image: str
    classes: dict[str, float]  # name -> probability
    error: str = ""
    """Why there is none: mostly because the image cannot be read."""

    @property
    def best(self) -> tuple[str, float]:
        """The likeliest class and its probability."""
        return next(iter(self.classes.items()))

    def row(self) -> tuple[str, str, str]:
        """Return it as a table has it."""
        name, probability = self.best
        return clean(self.image), clean(name), f"{probability:.1%}"

    def plain(self) -> dict[str, object]:
        """Return it as JSON has it."""
        if self.error:
            return {"image": self.image, "error": self.error}
        name, probability = self.best
        best = {"class": name, "probability": probability}
        return {"image": self.image, **best, "classes": self.classes}


def main(args: Sequence[str], task: str = "", prog: str = "") -> int:
    """Predict every image, then name those that could not be read; return the exit code.

    The weights are of this task, or of any.
    """
    given = parse(Predict, prog or called("predict"), with_weights_first(args))
    paths = image_paths(given.images)
    if given.top_k < 1:
        raise UsageError(f"--top-k {given.top_k}: not 1 or more")
    require_folder(given.csv)
    require_replaceable(given.csv, COLUMNS)
    given.model.check()
    weights = final_weights(given.checkpoint)
    from rackrun.training.trained import load

    trained = load(weights, replace(given.model, task=task or given.model.task))
    trained = trained.on_best_device() if given.device == "auto" else trained.on(given.device)
    results = list(predictions(trained, paths, given.top_k))
    if given.csv:
        write_table(Path(given.csv), _csv_rows(results))
    elif given.json:
        plain = [result.plain() for result in results]  # one list, in the order of the images
        sys.stdout.write(json.dumps(plain, indent=1, allow_nan=False) + "\n")
    elif rows := [each.row() for each in results if each.classes]:
        head = ("image", "class", "probability")
        sys.stdout.write(table(head, rows, wrapped=["image"], numbers=["probability"]))
    failed = [result for result in results if result.error]
    for result in failed:
        say(f"error: {result.image}: {result.error}")
    if dark := [path for path in paths if _is_dark(path)]:
        say(
            f"{plural(len(dark), 'image')} of 16 bits a channel, of which the upper 8 count, use at"
            f" most 14: {first_few(dark, 3)}; predicted as dark as they are"
        )
    return DataError.exit_code if failed else 0


def _is_dark(path: str) -> bool:
    from PIL import Image

    from rackrun.shards.images import UNDECODABLE
    from rackrun.shards.pillow import FEW_LEVELS, levels_left

    try:
        with Path(path).open("rb") as file:
            head = file.read(PNG_DEPTH_AT + 1)
        with Image.open(path) as image:
            is_deep = image.mode.startswith("I;16")
            is_deep |= image.format == "PNG" and head[PNG_DEPTH_AT] == 16
            return is_deep and levels_left(image) <= FEW_LEVELS
    except (*UNDECODABLE, Image.DecompressionBombError):
        return False  # which the prediction has said


def image_paths(images: Sequence[str]) -> list[str]:
    """Return the named files; raise UsageError if there are none, or a folder has none."""
    if not images:
        raise UsageError(
            "no images: type files or folders after the run or its file of weights, as in:"
            f" {called('predict')} runs/latest photos/"
        )
    return [path for given in images for path in _files(given)]


def _files(given: str) -> list[str]:
    if "://" in given:
        raise UsageError(f"{given}: download the image, and type its path")
    if Path(given).is_dir():
        below = {path.relative_to(given).as_posix(): path for path in Path(given).rglob("*")}
        named = [
            path
            for name, path in below.items()
            if name.lower().endswith(SUFFIXES) and not (HIDDEN.search(name) or system_folder(name))
        ]
        paths = [str(path) for path in sorted(named) if path.is_file()]
        what = f"{given}: no images in this folder ({', '.join(SUFFIXES)})"
    elif glob.has_magic(given) and not Path(given).exists():
        matches = glob.glob(given, recursive=True)  # noqa: PTH207  Path.glob refuses /absolute/*
        paths = sorted(path for path in matches if Path(path).is_file())
        what = f"{given}: no file is called like this"
    else:
        return [given]
    if not paths:
        raise UsageError(what)
    return paths


def predictions(trained: "Trained", paths: Sequence[str], top_k: int) -> Iterator[Prediction]:
    """Yield the prediction for each file, in order."""
    from rackrun.training.camera_files import for_prediction

    remaining = iter(paths)
    while batch := list(islice(remaining, BATCH)):
        pixels, errors = [], dict[int, str]()
        for number, path in enumerate(batch):
            try:
                pixels.append(for_prediction(trained.transforms, Path(path).read_bytes()))
            except OSError as refused:
                errors[number] = f"cannot be read: {refused.strerror}"
            except DataError as refused:
                errors[number] = str(refused)
        predicted = iter(trained.predict_pixels(pixels, top_k))
        for number, path in enumerate(batch):
            error = errors.get(number, "")
            classes = {} if error else next(predicted)
            if not (classes or error):
                error = "the model's output is not finite"
            yield Prediction(path, classes, error)


def _csv_rows(results: Sequence[Prediction]) -> Iterator[tuple[object, ...]]:
    yield COLUMNS
    for result in results:
        for rank, (name, share) in enumerate(result.classes.items(), start=1):
            yield result.image, rank, name, share
