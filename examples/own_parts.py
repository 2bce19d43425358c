"""A model, an optimizer and a learning rate schedule of your own, for any task that takes them:

./run-local classify --data FOLDER --weights '' --model examples.own_parts:Net \
    --optimizer examples.own_parts:Lion --lr-schedule examples.own_parts:triangle --lr 1e-3
"""

import torch
from torch import nn


class Net(nn.Sequential):
    """Images (batch, 3, side, side) -> logits (batch, classes)."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Conv2d(3, 32, 3, stride=2), nn.ReLU())
        self.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes)])


class Lion(torch.optim.Optimizer):
    """Steps of one length by the sign of the momentum (Chen et al. 2023, arXiv:2302.06675)."""

    def __init__(self, params, lr, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            lr, (short, long) = group["lr"], group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                update = momentum.lerp(weight.grad, 1 - short).sign()
                weight.mul_(1 - lr * group["weight_decay"]).sub_(update, alpha=lr)
                momentum.lerp_(weight.grad, 1 - long)


def triangle(step: int, steps: int) -> float:
    """Return the factor on --lr at a step: it rises for a third of the steps, then falls."""
    return min(3 * (step + 1) / steps, 1.5 * (1 - step / steps), 1)
