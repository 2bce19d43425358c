"""Layers that keep their weights while others train."""

from collections.abc import Sequence

from torch import nn

from rackrun.errors import UsageError
from rackrun.user_code.sources import nearest
from training.layers import head_of
from training.settings.optim import BODY


def frozen_weights(model: nn.Module, names: Sequence[str], classes: int) -> set[str]:
    """Return the weights of the named layers; BODY names all but the last layer.

    UsageError for a name that no layer has, and when nothing is left to train.
    """
    weights = [name for name, _ in model.named_parameters()]
    frozen: set[str] = set()
    for name in names:
        if name == BODY:
            head = head_of(model, classes)
            matching = [weight for weight in weights if not weight.startswith(f"{head}.")]
        else:
            matching = [weight for weight in weights if f"{weight}.".startswith(f"{name}.")]
        if not matching:
            layers = [BODY, *(layer for layer, _ in model.named_modules() if layer)]
            raise UsageError(f"--freeze {name}: no layer of the model; {nearest(name, layers)}")
        frozen.update(matching)
    if frozen.issuperset(weights):
        raise UsageError(f"--freeze {','.join(names)}: leaves nothing to train")
    return frozen


def resting_modules(model: nn.Module, frozen: set[str]) -> list[nn.Module]:
    """Return the modules whose weights are all frozen: their statistics and dropout rest, too."""
    resting = []
    for prefix, module in model.named_modules():
        module_weights = {name for name, _ in module.named_parameters(prefix)}
        if module_weights and module_weights <= frozen:
            resting.append(module)
    return resting
