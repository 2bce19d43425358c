"""Update rules for global batches of many thousands: each layer's step fits its weights.

A layer moves by a share of the length of its weights, not of its gradient: LARS (You, Gitman and
Ginsburg, 2017, arXiv:1708.03888) does so to SGD with momentum, LAMB (You et al., 2019,
arXiv:1904.00962) to Adam. Groups without weight decay (norms and biases) take plain steps.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

Group = dict[str, Any]


class Lars(Optimizer):
    """SGD with momentum whose step in each layer is `trust` times the length of its weights."""

    def __init__(
        self, groups: Iterable[Group], lr: float, momentum: float = 0.9, trust: float = 1e-3
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step with the gradients that are there."""
        for group in self.param_groups:
            weights, gradients = with_gradients(group)
            if not weights:
                continue
            if group["weight_decay"]:
                decay = group["weight_decay"]
                gradients = list(torch._foreach_add(gradients, weights, alpha=decay))
                torch._foreach_mul_(gradients, ratios(weights, gradients, group["trust"]))
            momenta = self._kept("momentum", weights)
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, gradients, alpha=group["lr"])
            torch._foreach_sub_(weights, momenta)

    def _kept(self, name: str, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        for weight in weights:
            self.state[weight].setdefault(name, torch.zeros_like(weight))
        return [self.state[weight][name] for weight in weights]


class Lamb(Optimizer):
    """Adam whose step in each layer is as long as its weights, times the rate."""

    def __init__(
        self,
        groups: Iterable[Group],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-6,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "epsilon": epsilon, "steps": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step with the gradients that are there."""
        for group in self.param_groups:
            weights, gradients = with_gradients(group)
            if not weights:
                continue
            group["steps"] += 1
            updates = self._updates(group, weights, gradients)
            if group["weight_decay"]:
                torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
                torch._foreach_mul_(updates, ratios(weights, updates, 1.0))
            torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def _updates(
        self, group: Group, weights: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Mean gradient over root of mean square, both without the bias of the first steps."""
        for weight in weights:
            if not self.state[weight]:
                self.state[weight] |= {
                    "mean": torch.zeros_like(weight),
                    "square": torch.zeros_like(weight),
                }
        means = [self.state[weight]["mean"] for weight in weights]
        squares = [self.state[weight]["square"] for weight in weights]
        first, second = group["betas"]
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        roots = torch._foreach_sqrt(torch._foreach_div(squares, 1 - second ** group["steps"]))
        torch._foreach_add_(roots, group["epsilon"])
        updates: list[torch.Tensor] = list(
            torch._foreach_div(torch._foreach_div(means, 1 - first ** group["steps"]), roots)
        )
        return updates


def with_gradients(group: Group) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The weights of a group that have a gradient, and the gradients."""
    weights = [weight for weight in group["params"] if weight.grad is not None]
    return weights, [weight.grad for weight in weights]


def ratios(
    weights: list[torch.Tensor], updates: list[torch.Tensor], trust: float
) -> list[torch.Tensor]:
    """Per layer, trust x length of the weights / length of the update; 1 where one of them is 0.

    The numbers stay on the device: no step waits for them.
    """
    lengths = torch.stack(torch._foreach_norm(weights))
    steps = torch.stack(torch._foreach_norm(updates))
    usable = (lengths > 0) & (steps > 0)
    scaled = torch.where(usable, trust * lengths / steps.clamp_min(1e-30), 1.0)
    return list(scaled.unbind())
