"""The optimizer that the settings ask for."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from training.config import OptimSettings
from training.optim.groups import make_groups


def make_optimizer(model: nn.Module, config: OptimSettings) -> Optimizer:
    """Return the optimizer of the settings, with a group of weights for each decay and rate."""
    groups = make_groups(model, config)
    if config.optimizer == "adamw":
        return AdamW(groups, lr=config.lr)
    nesterov = config.nesterov and config.momentum > 0
    return SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=nesterov)
