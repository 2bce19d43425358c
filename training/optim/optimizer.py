"""The optimizer that the settings ask for."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from rackrun.errors import UsageError
from rackrun.user_code.imports import imported, is_import_path
from training.optim.groups import make_groups
from training.optim.lamb import Lamb
from training.settings.optim import OptimSettings


def make_optimizer(model: nn.Module, config: OptimSettings) -> Optimizer:
    """Return the optimizer of the settings, with a group of weights for each decay and rate."""
    groups = make_groups(model, config)
    if is_import_path(config.optimizer):
        return _own_optimizer(config.optimizer, groups, config.lr)
    if config.optimizer == "lamb":
        return Lamb(groups, lr=config.lr)
    # One kernel for all weights, which also decides on the device whether float16 skips a step. On
    # the CPU it would be slower than loops, and round otherwise.
    fused = next(model.parameters()).device.type == "cuda" or None
    if config.optimizer == "adamw":
        return AdamW(groups, lr=config.lr, fused=fused)
    nesterov = config.nesterov and config.momentum > 0
    return SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=nesterov, fused=fused)


def _own_optimizer(name: str, groups: list[dict[str, Any]], lr: float) -> Optimizer:
    """Return what the user's function or class makes of the groups, which have the weight decay."""
    optimizer = imported("--optimizer", name, "lion", "params", "lr")(params=groups, lr=lr)
    if not isinstance(optimizer, Optimizer):
        what = f"returns no torch.optim.Optimizer, but {type(optimizer).__name__}"
        raise UsageError(f"--optimizer {name}: {what}")
    return optimizer
