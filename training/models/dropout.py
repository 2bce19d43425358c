"""Dropout before the last layer of any model."""

from typing import Any

from torch import nn
from torch.nn.functional import dropout

from training.optim.freezing import head_of


class InputDropout:
    """A hook that drops inputs of a layer in training mode; it adds no module, so no new names."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the inputs, some of them zero."""
        return (dropout(inputs[0], self.share, layer.training), *inputs[1:])


def with_dropout(model: nn.Module, share: float, classes: int) -> nn.Module:
    """Return the model with that much dropout before its last layer; 0 leaves it as it is.

    A model that has a dropout there, as MobileNet's, gets another share for it.
    """
    if not share:
        return model
    modules = list(model.named_modules())
    head_index = [name for name, _ in modules].index(head_of(model, classes))
    before, head = modules[head_index - 1][1], modules[head_index][1]
    if isinstance(before, nn.Dropout):
        before.p = share
    else:
        head.register_forward_pre_hook(InputDropout(share))
    return model
