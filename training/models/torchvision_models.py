"""Models of torchvision by name."""

from collections.abc import Sequence

from torch import nn

from rackrun.errors import UsageError
from training.models.registered import MAXVIT, other_models, refuse_size

HALVES = ("googlenet", "inception_v3", "efficientnet_v2_l")
"""Models whose published weights were trained on pixels from -1 to 1."""


def torchvision_model(
    name: str, classes: int, size: int, task_models: Sequence[str] = ()
) -> nn.Module:
    """Return a classification model of torchvision by its name in the registry, without weights.

    UsageError for a name that neither the registry nor the task (`own`) has, and for a size that
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
