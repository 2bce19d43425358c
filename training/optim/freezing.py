"""Layers that keep their weights while others train."""

from collections.abc import Sequence

from torch import nn

from rackrun.errors import UsageError
from training.config import BODY, nearest


def head_of(model: nn.Module) -> str:
    """Return the name of the last layer, which has an output for each class."""
    layers: list[str] = [
        name for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)
    ]
    return layers[-1]


def frozen_weights(model: nn.Module, names: Sequence[str]) -> set[str]:
    """Return the weights of the named layers; BODY names all but the last layer.

    UsageError for a name that no layer has, and when nothing is left to train.
    """
    weights = [name for name, _ in model.named_parameters()]
    frozen: set[str] = set()
    for name in names:
        if name == BODY:
            head = head_of(model)
            found = [weight for weight in weights if not weight.startswith(f"{head}.")]
        else:
            found = [weight for weight in weights if f"{weight}.".startswith(f"{name}.")]
        if not found:
            layers = [BODY, *(layer for layer, _ in model.named_modules() if layer)]
            raise UsageError(f"--freeze {name}: no layer of the model; {nearest(name, layers)}")
        frozen.update(found)
    if frozen.issuperset(weights):
        raise UsageError(f"--freeze {','.join(names)}: leaves nothing to train")
    return frozen


def resting_modules(model: nn.Module, frozen: set[str]) -> list[nn.Module]:
    """Return the modules whose weights are all frozen: their statistics and dropout rest, too."""
    found = []
    for prefix, module in model.named_modules():
        own = {name for name, _ in module.named_parameters(prefix)}
        if own and own <= frozen:
            found.append(module)
    return found
