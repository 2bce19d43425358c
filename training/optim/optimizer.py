"""The optimizer that the settings ask for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from rackrun.errors import UsageError
from rackrun.user_code.imports import imported, is_import_path
from training.optim.groups import make_groups
from training.settings.optim import OptimSettings

Tensors = list[torch.Tensor]


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


class Lamb(Optimizer):
    """LAMB: Adam whose step in each layer is as long as its weights, for batches of many thousands.

    After You et al., 2020, arXiv:1904.00962, algorithm 2 with the identity for its function of the
    weights' norm. As in the authors' code, what has no weight decay takes Adam's step as it is.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step with the gradients that are there."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            updates = self._updates(weights, group["betas"], group["eps"])
            if group["weight_decay"]:
                torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
                torch._foreach_mul_(updates, trust_ratios(weights, updates))
            torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def _updates(self, weights: Tensors, betas: tuple[float, float], eps: float) -> Tensors:
        """Return Adam's updates: mean gradients over roots of mean squares, without their bias."""
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        kept = [self._kept(weight) for weight in weights]
        means, squares = ([state[name] for state in kept] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(means, gradients, 1 - betas[0])
        torch._foreach_mul_(squares, betas[1])
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - betas[1])
        # Layers that were frozen at first have taken fewer steps than others.
        unbiased = [[1 - beta ** state["step"] for state in kept] for beta in betas]
        roots = torch._foreach_sqrt(torch._foreach_div(squares, unbiased[1]))
        torch._foreach_add_(roots, eps)
        updates = torch._foreach_div(means, unbiased[0])
        torch._foreach_div_(updates, roots)
        return list(updates)

    def _kept(self, weight: torch.Tensor) -> dict[str, Any]:
        """Return what is kept for a weight, one step further."""
        kept: dict[str, Any] = self.state[weight]
        if not kept:
            kept["step"] = 0
            kept["exp_avg"], kept["exp_avg_sq"] = (torch.zeros_like(weight) for _ in range(2))
        kept["step"] += 1
        return kept


def trust_ratios(weights: Tensors, updates: Tensors) -> Tensors:
    """Return the norm of each layer's weights over that of its update; 1 where either is 0."""
    of_weights = torch.stack(torch._foreach_norm(weights))
    of_updates = torch.stack(torch._foreach_norm(updates))
    moves = (of_weights > 0) & (of_updates > 0)
    return list(torch.where(moves, of_weights / of_updates, 1.0).unbind())
