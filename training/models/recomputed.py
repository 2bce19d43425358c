"""Gradient checkpointing: backward computes the inside of a model's blocks a second time.

Only the inputs of a block are kept (Chen et al., 2016, arXiv:1604.06174). Blocks are those that
--layer-decay counts, as far as they consist of several layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from rackrun.errors import UsageError
from training.optim.groups import blocks_of


def with_recomputed_blocks(model: nn.Module, recompute: bool) -> nn.Module:
    """Return the model, its blocks computed again in backward if wanted; UsageError without any."""
    if not recompute:
        return model
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
            forward, *inputs, use_reentrant=False, context_fn=lambda: self._contexts()
        )

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _uncounted(self.block)


@contextmanager
def _uncounted(block: nn.Module) -> Iterator[None]:
    """Keep the running statistics of norms, which have taken up these images already."""
    # Without running statistics they would save other tensors for backward than the first time.
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
