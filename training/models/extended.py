"""What settings add to a task's model: dropout, stochastic depth, gradient checkpointing, zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import dropout
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from rackrun.errors import UsageError
from rackrun.training.layers import blocks_of, head_of


def with_dropout(model: nn.Module, share: float, classes: int) -> nn.Module:
    """Return the model with that much dropout before its last layer.

    A model that has a dropout there, as MobileNet's, gets another share for it.
    """
    modules = list(model.named_modules())
    head_index = [name for name, _ in modules].index(head_of(model, classes))
    before, head = modules[head_index - 1][1], modules[head_index][1]
    if isinstance(before, nn.Dropout):
        before.p = share
    else:
        head.register_forward_pre_hook(InputDropout(share))
    return model


class InputDropout:
    """A hook that drops inputs of a layer in training mode; it adds no module, so no new names."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the inputs, some of them zero."""
        return (dropout(inputs[0], self.share, layer.training), *inputs[1:])


def with_stochastic_depth(model: nn.Module, share: float) -> nn.Module:
    """Return the model with that much stochastic depth in its last block.

    Training leaves out residual branches (Huang et al., 2016, arXiv:1603.09382); the share rises
    evenly from none in the first block. UsageError unless it is a ResNet of torchvision, or one
    that has stochastic depth of its own.
    """
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


class SkippedBranch:
    """A hook that leaves out a branch of some images in training mode; it adds no module."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, last: nn.Module, inputs: Any, branch: torch.Tensor) -> torch.Tensor:
        """Return the branch's outputs, zero for some images and larger for the others."""
        from torchvision.ops import stochastic_depth

        dropped: torch.Tensor = stochastic_depth(branch, self.share, "row", last.training)
        return dropped


def begin_as_identity(model: nn.Module) -> None:
    """Set the last norm of each residual block to 0, so that it passes on its input at first.

    UsageError for a model without such blocks. The rule is of Goyal et al., 2017, arXiv:1706.02677.
    """
    norms = last_norms(model)
    if not norms:
        raise UsageError(
            "--zero-init-residual: the model has no residual blocks of torchvision; type"
            " --no-zero-init-residual"
        )
    for norm in norms:
        nn.init.zeros_(norm.get_parameter("weight"))


def last_norms(model: nn.Module) -> list[nn.Module]:
    """Return the last norm of each block's residual branch, from the image on."""
    from torchvision.models.resnet import BasicBlock, Bottleneck

    blocks = [module for module in model.modules() if isinstance(module, BasicBlock | Bottleneck)]
    return [block.bn3 if isinstance(block, Bottleneck) else block.bn2 for block in blocks]


def with_recomputed_blocks(model: nn.Module) -> nn.Module:
    """Return the model with blocks that backward computes again; UsageError if it has none.

    Only the inputs of a block are kept (Chen et al., 2016, arXiv:1604.06174). Blocks are those that
    --layer-decay counts, as far as they consist of several layers.
    """
    named = [model.get_submodule(name) for name in blocks_of(model)]
    blocks = [block for block in named if any(True for _ in block.children())]
    if not blocks:
        raise UsageError("--gradient-checkpointing: the model has no blocks of several layers")
    for block in blocks:
        block.forward = Recomputed(block, block.forward)
    return model


class Recomputed:
    """The forward of a block, whose inside is not kept for backward."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        self.block = block
        self.forward = forward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the block's outputs."""
        forward = partial(self.forward, **named)
        if not torch.is_grad_enabled():
            return forward(*inputs)
        return checkpoint(
            forward,
            *inputs,
            use_reentrant=False,
            # The context of the first forward, and that of the one in backward.
            context_fn=lambda: (nullcontext(), _uncounted(self.block)),
        )


@contextmanager
def _uncounted(block: nn.Module) -> Iterator[None]:
    # Norms have counted these images already. Their statistics are kept rather than switched off,
    # as without any they would save other tensors for backward than the first time.
    norms = [
        (module, module.momentum, module.num_batches_tracked)
        for module in block.modules()
        if isinstance(module, _BatchNorm)
    ]
    for norm, _, _ in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, count in norms:
            norm.momentum, norm.num_batches_tracked = momentum, count
