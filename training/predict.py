"""Predictions of a trained model for images, for every task.

    final.pt -> Trained
    files, folders, patterns -> paths -> Answer or Unread, in the same order -> a table, or JSON

Nothing here imports torch until there is something to predict, so that `--help` answers at once.
"""

import glob
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional

from rackrun.errors import DataError, SaveError, UsageError
from rackrun.shapes import AtMost, Misshapen, shaped
from rackrun.terminal import clean, one_line
from training.old_names import with_new_names

if TYPE_CHECKING:
    import torch
    from torch import nn

    from training.data.decode import Pixels
    from training.data.transforms import Transforms
    from training.task import Task

SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp")  # what a folder is searched for
BATCH = 64  # pictures
FIRST = 5  # classes in an answer; the table shows the first
BAR = 20  # characters
ClassNames = Annotated[list[str], AtMost(1_000_000)]


@dataclass(frozen=True)
class Predict:
    """Say what pictures show."""

    checkpoint: Positional[Path]
    """The weights: final.pt of a run."""
    pictures: Positional[tuple[str, ...]]
    """Pictures, folders of pictures, or patterns such as 'photos/*.jpg'."""
    json: bool = False
    """Print JSON instead of a table."""
    model: str = ""
    """The model that the weights were trained with, if it is your own: `my_models:Net`."""


@dataclass(frozen=True)
class Prediction:
    """Prediction for an image; the likeliest classes first."""

    picture: str
    classes: dict[str, float]  # name -> probability

    @property
    def best(self) -> tuple[str, float]:
        """The likeliest class and its probability."""
        return next(iter(self.classes.items()))

    def plain(self) -> dict[str, object]:
        """As JSON has it."""
        name, probability = self.best
        answer = {"class": name, "probability": probability, "classes": self.classes}
        return {"picture": self.picture, **answer}


@dataclass(frozen=True)
class Unread:
    """A picture that cannot be read, and why."""

    picture: str
    error: str

    def plain(self) -> dict[str, object]:
        """As JSON has it."""
        return {"picture": self.picture, "error": self.error}


@dataclass(frozen=True)
class Trained:
    """A trained model with everything that its use needs."""

    model: "nn.Module"
    transforms: "Transforms"
    classes: list[str]
    device: "torch.device"


def show(wish: Predict, task: "Task", settings: type) -> int:
    """Answer for every picture, then name those that could not be read; the exit code.

    `settings` is the class of the task's settings, which the checkpoint holds as plain data.
    """
    paths = found(wish.pictures)
    results = list(answers(load(wish.checkpoint, task, settings, wish.model), paths))
    print_json(results) if wish.json else print_table(results)
    unread = [result for result in results if isinstance(result, Unread)]
    for result in unread:
        sys.stderr.write(f"error: {visible(result.picture)}: {result.error}\n")
    return DataError.exit_code if unread else 0


def load(path: Path, task: "Task", settings: type, own_model: str = "") -> Trained:
    """Return the model in final.pt, or in a checkpoint; SaveError when it is not of this task.

    A file never chooses what is imported: `own_model` must name the user's own model as it does.
    """
    import torch

    from training.data.transforms import Transforms
    from training.run import checkpoint

    content = checkpoint.read(path)
    if content.get("task") != task.name:
        whose = clean(str(content.get("task") or "no task that is known here"))[:100]
        raise SaveError(f"{path}: weights of {whose}, and this is python -m {task.name} predict")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        transforms = shaped(content.get("preparation"), Transforms, "preparation")
        transforms.check()
        classes = shaped(content.get("classes"), ClassNames, "classes")
        config = shaped(_recorded(content.get("config")), settings, "config")
        _check_own_model(path, config.model, own_model)
        model = _model(task, config, len(classes), _weights(content))
    except (Misshapen, RuntimeError, TypeError, ValueError, UsageError) as error:
        reason = one_line(str(error))[:300]
        raise SaveError(f"{path}: not a model that this version can build: {reason}") from None
    return Trained(model.eval().to(device), transforms, classes, device)


def _check_own_model(path: Path, recorded: str, named: str) -> None:
    """Raise SaveError when the weights need a model of the user's own that is not the one named."""
    from training.models.named import is_import_path

    if is_import_path(recorded) and recorded != named:
        shown = clean(recorded)[:100]
        raise SaveError(
            f"{path}: trained with your own model; type --model {shown}, if you trust it"
        )


def _recorded(settings: Any) -> Any:
    """Return recorded settings by today's names; anything else as it is, to be refused."""
    return with_new_names(settings) if isinstance(settings, dict) else settings


def _model(
    task: "Task", config: Any, classes: int, weights: "dict[str, torch.Tensor]"
) -> "nn.Module":
    """The model of these settings with these weights.

    What it would take is found out without memory first: settings may say anything.
    """
    import torch

    from training.run import checkpoint

    try:
        with torch.device("meta"):
            planned = task.model(config, classes).state_dict()
    except (RuntimeError, NotImplementedError):  # a few of torchvision's cannot be built so
        planned = {}
    needed, found = (
        {name: tuple(tensor.shape) for name, tensor in table.items()}
        for table in (planned or weights, weights)
    )
    if differences := checkpoint.compare(needed, found):
        raise Misshapen("; ".join(differences))
    model = task.model(config, classes)
    model.load_state_dict(weights)
    return model


def _weights(content: dict[str, Any]) -> "dict[str, torch.Tensor]":
    """The weights in a final.pt; those that would become one in a checkpoint."""
    from training.models.weights import are_weights

    state = content.get("state")
    chosen = content.get("model")
    if isinstance(state, dict):
        chosen = chosen or state.get("average") or state.get("model")
    if not are_weights(chosen):
        raise Misshapen("it holds no named weights")
    return chosen


def found(pictures: Sequence[str]) -> list[str]:
    """The files that are meant; UsageError when nothing is, or a folder or pattern has none."""
    if not pictures:
        raise UsageError("no pictures: type the names of files or folders behind the checkpoint")
    return [path for given in pictures for path in _files(given)]


def _files(given: str) -> list[str]:
    if Path(given).is_dir():
        paths = [str(path) for path in sorted(Path(given).rglob("*")) if _is_picture(path)]
        what = f"{given}: no pictures in this folder ({', '.join(SUFFIXES)})"
    elif glob.has_magic(given) and not Path(given).exists():
        matches = glob.glob(given, recursive=True)  # noqa: PTH207  Path.glob refuses /absolute/*
        paths = sorted(path for path in matches if Path(path).is_file())
        what = f"{given}: no file is called like this"
    else:
        return [given]
    if not paths:
        raise UsageError(what)
    return paths


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file()


def answers(trained: Trained, paths: Sequence[str]) -> Iterator[Prediction | Unread]:
    """Yield the prediction for each file, in order."""
    remaining = iter(paths)
    while batch := list(islice(remaining, BATCH)):
        read = [_read(trained.transforms, path) for path in batch]
        said = iter(_said(trained, [pixels for pixels in read if not isinstance(pixels, Unread)]))
        for path, pixels in zip(batch, read, strict=True):
            yield pixels if isinstance(pixels, Unread) else Prediction(path, next(said))


def _read(transforms: "Transforms", path: str) -> "Pixels | Unread":
    """A file as the model sees it, or why it cannot be."""
    try:
        return transforms.for_evaluation(Path(path).read_bytes())
    except OSError as error:
        return Unread(path, f"cannot be read: {error.strerror}")
    except DataError as error:
        return Unread(path, str(error))


def _said(trained: Trained, pixels: "list[Pixels]") -> list[dict[str, float]]:
    """uint8 (side, side, channels) each -> the likeliest classes and their probabilities."""
    import numpy as np
    import torch

    if not pixels:
        return []
    images = torch.from_numpy(np.stack(pixels)).to(trained.device).permute(0, 3, 1, 2)
    with torch.inference_mode():
        outputs = trained.model(trained.transforms.normalised(images).contiguous())
        best = outputs.float().softmax(1).topk(min(FIRST, len(trained.classes)))
    return [
        {trained.classes[number]: round(share, 6) for share, number in zip(*row, strict=True)}
        for row in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def print_json(results: Sequence[Prediction | Unread]) -> None:
    """One list, in the order of the pictures."""
    sys.stdout.write(json.dumps([result.plain() for result in results], indent=1) + "\n")


def print_table(results: Sequence[Prediction | Unread]) -> None:
    """A line per picture: its name, what it shows, how sure the model is."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("picture", overflow="fold")
    table.add_column("class", style="bold")
    table.add_column("probability", justify="right")
    table.add_column("")
    for result in results:
        if isinstance(result, Prediction):
            name, share = result.best
            bar = Text("━" * round(share * BAR), style="green" if share > 0.8 else "yellow")
            table.add_row(Text(visible(result.picture)), Text(visible(name)), f"{share:.1%}", bar)
    console = Console(width=None if sys.stdout.isatty() else 1000)
    if table.row_count:
        console.print(table)


def visible(name: str) -> str:
    """A name without anything that moves the cursor or cannot be printed."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in name
    )
