"""The optimizer that the settings ask for."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from training.config import OptimSettings


def make_optimizer(model: nn.Module, config: OptimSettings) -> Optimizer:
    """Return the optimizer of the settings; norms and biases have no weight decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if config.optimizer == "adamw":
        return AdamW(groups, lr=config.lr)
    return SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0)
