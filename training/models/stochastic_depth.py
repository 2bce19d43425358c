"""Stochastic depth: training leaves out residual branches (Huang et al., 2016, arXiv:1603.09382).

The share rises evenly from none in the first block to the given one in the last.
"""

from typing import Any

import torch
from torch import nn

from rackrun.errors import UsageError
from training.models.residual_blocks import last_norms


class SkippedBranch:
    """A hook that leaves out a branch of some images in training mode; it adds no module."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, last: nn.Module, inputs: Any, branch: torch.Tensor) -> torch.Tensor:
        """Return the branch's outputs, zero for some images and larger for the others."""
        from torchvision.ops import stochastic_depth

        dropped: torch.Tensor = stochastic_depth(branch, self.share, "row", last.training)
        return dropped


def with_stochastic_depth(model: nn.Module, share: float) -> nn.Module:
    """Return the model with that much stochastic depth in its last block; 0 leaves it as it is.

    UsageError unless it is a ResNet of torchvision, or one that has stochastic depth of its own.
    """
    if not share:
        return model
    from torchvision.ops import StochasticDepth

    with_own_depth = [module for module in model.modules() if isinstance(module, StochasticDepth)]
    branch_ends = [*last_norms(model), *with_own_depth]
    if not branch_ends:
        raise UsageError(
            f"--stochastic-depth {share:g}: the model has no residual blocks of torchvision; type"
            " --stochastic-depth 0"
        )
    for number, module in enumerate(branch_ends):
        share_of_block = share * number / max(len(branch_ends) - 1, 1)
        if isinstance(module, StochasticDepth):
            module.p = share_of_block
        else:
            module.register_forward_hook(SkippedBranch(share_of_block))
    return model
