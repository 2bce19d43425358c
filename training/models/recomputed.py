"""Gradient checkpointing: blocks of any model whose inside backward computes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rackrun.errors import UsageError
from rackrun.training.layers import BATCH_NORMS, blocks_of


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
        if isinstance(module, BATCH_NORMS)
    ]
    for norm, _, _ in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, count in norms:
            norm.momentum, norm.num_batches_tracked = momentum, count
