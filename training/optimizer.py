"""The optimizer that the settings ask for, its groups of weights, and the scale of float16 losses.

Beyond those of torch.optim: LAMB, and an optimizer of the user's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, AdamW, Optimizer

from rackrun.errors import SaveError, UsageError
from rackrun.training.counts import Scaling
from rackrun.training.layers import blocks_of
from rackrun.training.settings.optim import OptimSettings
from rackrun.user_code.imports import imported, is_import_path

SPARED = ("token", "embed", "embedding", "bias_table", "scale")  # ends of a weight's own name

Group = dict[str, Any]
Tensors = list[torch.Tensor]


def make_optimizer(model: nn.Module, config: OptimSettings) -> Optimizer:
    """Return the optimizer of the settings, with a group of weights for each decay and rate."""
    groups = make_groups(model, config)
    if is_import_path(config.optimizer):
        make = imported("--optimizer", config.optimizer, "lion", "params", "lr")
        optimizer = make(params=groups, lr=config.lr)
        if not isinstance(optimizer, Optimizer):
            what = f"returns no torch.optim.Optimizer, but {type(optimizer).__name__}"
            raise UsageError(f"--optimizer {config.optimizer}: {what}")
        return optimizer
    if config.optimizer == "lamb":
        return Lamb(groups, lr=config.lr)
    # One kernel for all weights, which also decides on the device whether float16 skips a step. On
    # the CPU it would be slower than loops, and round otherwise.
    fused = next(model.parameters()).device.type == "cuda" or None
    if config.optimizer == "adamw":
        return AdamW(groups, lr=config.lr, fused=fused)
    nesterov = config.nesterov and config.momentum > 0
    return SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=nesterov, fused=fused)


def make_groups(model: nn.Module, config: OptimSettings) -> list[Group]:
    """Return the trainable weights in groups for torch.optim, those with weight decay first.

    `lr_scale` is a group's share of the learning rate: 1 for the last layer of the model, and
    --layer-decay times less for each one before it.
    """
    depths = _depths_of(model)
    spared = set() if config.decay_all else without_decay(model)
    deepest = max(depths.values(), default=0)
    scales = {name: config.layer_decay ** (deepest - depth) for name, depth in depths.items()}
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {
        (spares, scale): []
        for spares in (False, True)
        for scale in sorted(set(scales.values())) or [1.0]
    }
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            groups[name in spared, scales[name]].append(weight)
    return [
        {
            "params": weights,
            "weight_decay": 0.0 if spares else config.weight_decay,
            "lr_scale": scale,
        }
        for (spares, scale), weights in groups.items()
    ]


def without_decay(model: nn.Module) -> set[str]:
    """Return the weights without weight decay.

    Norms and biases; class tokens, position embeddings, tables of relative biases, scales; and
    those that the model names itself, as timm's do.
    """
    named = set(getattr(model, "no_weight_decay", set)())
    return {
        name
        for name, weight in model.named_parameters()
        if weight.ndim <= 1
        or name.endswith(SPARED)
        or name in named
        or not named.isdisjoint(name.split("."))
    }


def _depths_of(model: nn.Module) -> dict[str, int]:
    # By weight, the number of its block or layer, counted from the image on. A norm counts with the
    # layer before it, and so does what belongs to no layer, as class tokens.
    blocks = blocks_of(model)
    block_of = {
        name: next((block for block in blocks if name.startswith(f"{block}.")), "")
        for name, _ in model.named_parameters()
    }
    heavy = {block_of[name] for name, weight in model.named_parameters() if weight.ndim > 1} - {""}
    depths, depth, latest = {}, -1, ""
    for name, block in block_of.items():
        if block in heavy and block != latest:
            depth, latest = depth + 1, block
        depths[name] = max(depth, 0)
    return depths


def regrouped(saved: Group, optimizer: Optimizer) -> Group:
    """Return a saved state of the optimizer in the groups that it has now.

    SaveError for other groups.
    """
    groups = optimizer.state_dict()["param_groups"]
    sizes, saved_sizes = (
        [len(group["params"]) for group in each] for each in (groups, saved["param_groups"])
    )
    if sizes != saved_sizes:
        raise SaveError("the checkpoint's optimizer has other groups: type the run's --layer-decay")
    # Fused or not depends on the device here, and not on the one that it was saved on.
    kept_options = {name: groups[0][name] for name in ("fused",) if name in groups[0]}
    return {**saved, "param_groups": [{**group, **kept_options} for group in saved["param_groups"]]}


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
        """Take a step with the gradients that have been computed."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            updates = self._adam(weights, group["betas"], group["eps"])
            if group["weight_decay"]:
                torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
                torch._foreach_mul_(updates, trust_ratios(weights, updates))
            torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def _adam(self, weights: Tensors, betas: tuple[float, float], eps: float) -> Tensors:
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        states: list[dict[str, Any]] = [self.state[weight] for weight in weights]
        for weight, state in zip(weights, states, strict=True):
            if not state:
                state["step"] = 0
                state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(weight) for _ in range(2))
            state["step"] += 1
        means, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(means, gradients, 1 - betas[0])
        torch._foreach_mul_(squares, betas[1])
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - betas[1])
        # By layer: those that were frozen at first have taken fewer steps than others.
        unbiased = [[1 - beta ** state["step"] for state in states] for beta in betas]
        roots = torch._foreach_sqrt(torch._foreach_div(squares, unbiased[1]))
        torch._foreach_add_(roots, eps)
        updates = torch._foreach_div(means, unbiased[0])
        torch._foreach_div_(updates, roots)
        return list(updates)


def trust_ratios(weights: Tensors, updates: Tensors) -> Tensors:
    """Return the norm of each layer's weights over that of its update; 1 where either is 0."""
    of_weights = torch.stack(torch._foreach_norm(weights))
    of_updates = torch.stack(torch._foreach_norm(updates))
    moves = (of_weights > 0) & (of_updates > 0)
    return list(torch.where(moves, of_weights / of_updates, 1.0).unbind())


class LossScale:
    """Scales losses in float16, where small gradients vanish, and skips steps that overflow.

    Gradients are averaged over all ranks before they are checked, so that an overflow on one rank
    reaches all, and all skip the same steps. A skipped step counts as a step: its samples are used,
    the schedule goes on. Without float16, losses stay as they are and every step is taken.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self._scaler = GradScaler(device.type, enabled=enabled)
        self._one = torch.ones((), device=device)
        self._skipped = torch.zeros((), device=device)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of the scaled loss to those of the step's earlier parts."""
        torch.autograd.backward(self._scaler.scale(loss))

    def unscale(self, optimizer: Optimizer) -> None:
        """Undo the scale of the gradients, before something depends on their norm."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Take a step with the gradients, or skip it where they overflow."""
        if not self._scaler.is_enabled():
            optimizer.step()
            return
        # Only a smaller scale shows that the scaler has skipped a step. The comparison stays on the
        # device, so that the step does not wait for it.
        before = self._scaler.scale(self._one)
        self._scaler.step(optimizer)
        self._scaler.update()
        self._skipped += self._scaler.scale(self._one) < before

    def take(self) -> Scaling | None:
        """Return the scale and the steps skipped since the last call; None without float16.

        It waits for the device.
        """
        if not self._scaler.is_enabled():
            return None
        scaling = Scaling(self._scaler.get_scale(), int(self._skipped))
        self._skipped.zero_()
        return scaling

    def state_dict(self) -> dict[str, Any]:
        """Return what a run goes on with; nothing without float16."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; of a run without float16, nothing."""
        if state:
            self._scaler.load_state_dict(state)
