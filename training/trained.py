"""Load a trained model with everything needed to use it, from final.pt or a checkpoint.

file -> content, verified by its checksums -> Trained: the model, its classes, its transforms
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import nn

from rackrun.commandline.ranges import out_of_range
from rackrun.commands import called
from rackrun.contract.files import PUBLISHED
from rackrun.contract.tasks import TASKS
from rackrun.errors import SaveError, UsageError
from rackrun.runs import final_weights
from rackrun.shapes import Misshapen, at_most, shaped
from rackrun.shards.class_names import named_classes
from rackrun.terminal import clean, one_line, say
from rackrun.training import checkpoint
from rackrun.training.camera_files import for_prediction
from rackrun.training.config import Config
from rackrun.training.data.decode import Pixels
from rackrun.training.data.transforms import Transforms
from rackrun.training.differences import table_differences
from rackrun.training.models.named import is_own
from rackrun.training.models.weights import are_weights, load_weights
from rackrun.training.scores import answers
from rackrun.training.settings.model import ModelOptions
from rackrun.training.task import Task
from rackrun.training.tasks.definition import recipes_of, require_task, task_of
from rackrun.user_code.tasks import OWN_TASK

ClassNames = Annotated[list[str], at_most(1_000_000)]


@dataclass(frozen=True)
class Trained:
    """A trained model with everything needed to use it."""

    path: Path
    task: str
    model: nn.Module
    transforms: Transforms
    classes: list[str]
    config: Config
    """The settings that it was trained with."""
    device: torch.device = torch.device("cpu")

    def on_best_device(self) -> "Trained":
        """Return it with its model on a GPU, if there is one."""
        return self.on("cuda" if torch.cuda.is_available() else "cpu")

    def on(self, name: Literal["cpu", "cuda"]) -> "Trained":
        """Return it with its model on this device; UsageError where there is no such GPU."""
        if name == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda: torch finds no GPU here; type --device cpu")
        device = torch.device(name)
        return replace(self, model=self.model.to(device), device=device)

    def predict(self, images: Sequence[bytes], top_k: int = 5) -> list[dict[str, float]]:
        """Return the most likely classes of image files with their probabilities, best first.

        They are turned upright by their EXIF, and HEIC is read, as in a conversion of own images.
        There are none of an image for which the model's output is not finite. Raise TypeError for
        a path or a decoded image.
        """
        if not isinstance(images, Sequence) or not all(isinstance(each, bytes) for each in images):
            raise TypeError('predict takes a list of files: [Path("cat.jpg").read_bytes()]')
        return self.predict_pixels(
            [for_prediction(self.transforms, data) for data in images], top_k
        )

    def predict_pixels(self, pixels: Sequence[Pixels], top_k: int) -> list[dict[str, float]]:
        """Return the same for images as evaluation sees them: uint8 (side, side, channels) each."""
        if not pixels:
            return []
        images = torch.from_numpy(np.stack(pixels)).to(self.device).permute(0, 3, 1, 2)
        with torch.inference_mode():
            best = answers(self.model(self.transforms.normalized(images).contiguous()), top_k)
        return [
            {
                self.classes[number]: round(share, 6)
                for number, share in zip(numbers, shares, strict=True)
            }
            if is_finite
            else {}
            for numbers, shares, is_finite in zip(*(each.tolist() for each in best), strict=True)
        ]


def load(given: str | PathLike[str], options: ModelOptions) -> Trained:
    """Return the model of a run or its file, or published weights as they are."""
    if options.weights:
        return published_model(options)
    return load_of_any_task(given, options.model, options.task)


def published_model(options: ModelOptions) -> Trained:
    """Return a model with weights from a file that no run has written, as the task classify has it.

    SaveError unless the file has a row of the last layer for each class.
    """
    names, path = [*named_classes(Path(options.classes))], Path(options.weights)
    source = require_task("classify")
    task = task_of(source)
    settings: Any = recipes_of(source)["default"]
    config = task.resolve(
        settings(
            model=options.model,
            weights="" if is_own(options.model) else PUBLISHED,
            image_size=options.image_size,
            short_side=options.short_side,
            mean=options.mean,
            std=options.std,
        )
    )
    network, transforms = task.built(config, len(names)), task.transformed(config, 0)
    say(load_weights(network, path, names, transforms, whole=True))
    say(f"the model sees images of {transforms.described()}")
    return Trained(path, task.name, network.eval(), transforms, names, config)


def load_of_any_task(
    weights: str | PathLike[str], own_model: str = "", own_task: str = ""
) -> Trained:
    """Return the model in a run folder or file of any task, on the CPU; SaveError if there is none.

    The user's own task has to be named, for the same reason as `own_model`.
    """
    path = final_weights(weights)
    content = checkpoint.read(path)
    task_name = own_task or str(content.get("task"))
    task_in_file = clean(str(content.get("task") or "an unknown task"))[:100]
    if not own_task and task_name not in TASKS:
        raise SaveError(
            f"{path}: weights of {task_in_file}; known: {', '.join(TASKS)}; for your own task, type"
            f" --task {OWN_TASK}"
        )
    source = require_task(task_name)
    task = task_of(source)
    if (trained_task := content.get("task")) != task.name:
        is_known = isinstance(trained_task, str) and trained_task in TASKS
        next_step = (
            f"{called('predict')} {path}" if is_known else "--task with the task that trained them"
        )
        raise SaveError(f"{path}: weights of {task_in_file}, not of {task.name}; type {next_step}")
    return _built(path, content, task, recipes_of(source)["default"], own_model)


def _built(
    path: Path, content: dict[str, Any], task: Task, settings: type, own_model: str
) -> Trained:
    try:
        transforms = shaped(content.get("preparation"), Transforms, "preparation")
        transforms.check()
        classes = shaped(content.get("classes"), ClassNames, "classes")
        config = shaped(content.get("config"), settings, "config")
        if sentences := out_of_range(config):
            raise Misshapen(sentences[0])
        # To import the module that a file names would run code of whoever wrote the file: the user
        # has to name it, too. No `except` below catches this SaveError.
        if is_own(config.model) and config.model != own_model:
            shown = clean(config.model)[:100]
            raise SaveError(
                f"{path}: trained with your own model; type --model {shown}, if you trust it"
            )
        state, weights = content.get("state"), content.get("model")
        if isinstance(state, dict):  # of a checkpoint: what would be in final.pt
            weights = weights or state.get("average") or state.get("model")
        if not are_weights(weights):
            raise Misshapen("it holds no named weights")
        model = _model(task, config, len(classes), weights)
    except (Misshapen, RuntimeError, TypeError, ValueError, UsageError) as error:
        reason = one_line(str(error))[:300]
        raise SaveError(f"{path}: not a model that this version can build: {reason}") from None
    return Trained(path, task.name, model.eval(), transforms, classes, config)


def _model(task: Task, config: Any, classes: int, weights: dict[str, torch.Tensor]) -> nn.Module:
    # What the model would take is found out without memory first: settings may hold anything.
    try:
        with torch.device("meta"):
            planned = task.built(config, classes).state_dict()
    except (RuntimeError, NotImplementedError):  # a few of torchvision's cannot be built so
        planned = {}
    model_shapes, loaded_shapes = (
        {name: tuple(tensor.shape) for name, tensor in table.items()}
        for table in (planned or weights, weights)
    )
    if differences := table_differences(model_shapes, loaded_shapes):
        raise Misshapen("; ".join(differences))
    model = task.built(config, classes)
    model.load_state_dict(weights)
    return model
