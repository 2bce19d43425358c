"""The optimizer that the settings ask for, and its groups of weights.

Beyond those of torch.optim: timm's LAMB, and an optimizer of the user's own.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from rackrun.errors import MissingPackage, SaveError, UsageError
from rackrun.training.layers import blocks_of
from rackrun.training.settings.optim import OptimSettings
from rackrun.user_code.imports import imported, is_import_path

SPARED = ("token", "embed", "embedding", "bias_table", "scale")  # ends of a weight's own name

Group = dict[str, Any]


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
        return _lamb(groups, config.lr)
    # One kernel for all weights, which also decides on the device whether float16 skips a step. On
    # the CPU it would be slower than loops, and round otherwise.
    fused = next(model.parameters()).device.type == "cuda" or None
    if config.optimizer == "adamw":
        return AdamW(groups, lr=config.lr, fused=fused)
    nesterov = config.nesterov and config.momentum > 0
    return SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=nesterov, fused=fused)


def _lamb(groups: list[Group], lr: float) -> Optimizer:
    try:
        from timm.optim import Lamb
    except ImportError:
        raise MissingPackage("timm", "timm") from None
    optimizer: Optimizer = Lamb(groups, lr=lr, max_grad_norm=None)  # --clip-grad decides on that
    return optimizer


def make_groups(model: nn.Module, config: OptimSettings) -> list[Group]:
    """Return the trainable weights in groups for torch.optim, those with weight decay first.

    `lr_scale` is a group's share of the learning rate: 1 for the last layer of the model, and
    --layer-decay times less for each one before it.
    """
    spared = set() if config.decays_all else without_decay(model)
    scales = _lr_scales(model, config.layer_decay)
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


def _lr_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    if layer_decay == 1:
        return dict.fromkeys((name for name, _ in model.named_parameters()), 1.0)
    depths = _depths_of(model)
    deepest = max(depths.values(), default=0)
    return {name: layer_decay ** (deepest - depth) for name, depth in depths.items()}


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
