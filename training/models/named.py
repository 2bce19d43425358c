"""Models by the name in --model: torchvision's, timm's (`timm:NAME`), or the user's own."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from rackrun.errors import UsageError
from rackrun.user_code.imports import imported
from training.data.transforms import Transforms
from training.models import timm_models
from training.models.registered import MAXVIT, TIMM, has_one_size, other_models, refuse_size

HALVES = ("googlenet", "inception_v3", "efficientnet_v2_l")
"""Models of torchvision whose published weights were trained on pixels from -1 to 1."""


def named_model(name: str, classes: int, size: int, task_models: Sequence[str] = ()) -> nn.Module:
    """Return the model of a name, without weights; UsageError for a name that means none.

    `task_models` are the names of the task's own models, for the message.
    """
    if name.startswith(TIMM):
        return timm_models.timm_model(name.removeprefix(TIMM), classes, size)
    if is_own(name):
        return _imported_model(name, classes)
    return torchvision_model(name, classes, size, task_models)


def torchvision_model(
    name: str, classes: int, size: int, task_models: Sequence[str] = ()
) -> nn.Module:
    """Return a classification model of torchvision by its name in the registry, without weights.

    UsageError for a name that neither the registry nor the task has, and for a size that
    the model cannot have.
    """
    import torchvision  # it takes as long as torch to import, and a task may have its own models

    torchvision_names = torchvision.models.list_models(module=torchvision.models)
    if name not in torchvision_names:
        raise UsageError(
            f"--model {name}: no such model; {other_models(name, task_models, torchvision_names)}"
        )
    refuse_size(name, size)
    builder = torchvision.models.get_model_builder(name)
    options: dict[str, object] = {"num_classes": classes}
    if name in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": True}
    if name.startswith("vit_"):
        options["image_size"] = size
    if name.startswith(MAXVIT):
        options["input_size"] = (size, size)
    model = builder(weights=None, **options)
    assert isinstance(model, nn.Module)
    return model


def normalised_for(model: str, transforms: Transforms) -> Transforms:
    """Return the transforms with the normalisation of a model's published weights."""
    if model.startswith(TIMM):
        return timm_models.timm_normalised(model.removeprefix(TIMM), transforms)
    if model not in HALVES:
        return transforms
    half = (0.5, 0.5, 0.5)
    return replace(transforms, mean=half, deviation=half)


def takes_one_size(name: str) -> bool:
    """Return whether a model is built for images of one size."""
    return has_one_size(name) or (
        name.startswith(TIMM) and timm_models.takes_one_size(name.removeprefix(TIMM))
    )


def is_own(name: str) -> bool:
    """Return whether a name is that of the user's own model, MODULE:NAME."""
    return ":" in name and not name.startswith(TIMM)


def _imported_model(name: str, classes: int) -> nn.Module:
    """Return what the user's function or class builds; exceptions of their code pass through."""
    model = imported("--model", name, "Net", "num_classes")(num_classes=classes)
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {name}: returns no torch.nn.Module, but {type(model).__name__}")
    return model
