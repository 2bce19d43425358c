"""The groups of weights that an optimizer treats alike: by weight decay, and by depth."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from rackrun.errors import SaveError
from training.layers import blocks_of
from training.settings.optim import OptimSettings

SPARED = ("token", "embed", "embedding", "bias_table", "scale")  # ends of a weight's own name

Group = dict[str, Any]


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


def regrouped(saved: Group, optimizer: Optimizer) -> Group:
    """Return a saved state of the optimizer in the groups that it has now.

    Whether it is fused depends on the device, and not on the one it was saved on. SaveError for
    other groups.
    """
    groups = optimizer.state_dict()["param_groups"]
    if _sizes(saved["param_groups"]) != _sizes(groups):
        raise SaveError("the checkpoint's optimizer has other groups: type the run's --layer-decay")
    kept_options = {name: groups[0][name] for name in ("fused",) if name in groups[0]}
    return {**saved, "param_groups": [{**group, **kept_options} for group in saved["param_groups"]]}


def _sizes(groups: list[Group]) -> list[int]:
    return [len(group["params"]) for group in groups]


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
    """Return the depth of each weight: the model's blocks and layers, numbered from the image on.

    A norm counts with the layer before it, and so does what belongs to no layer, as class tokens.
    """
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
