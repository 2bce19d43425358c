"""Batch norms in steps that give a rank, or a part of its batch, a single image.

The norm of a convolution has a value per pixel then, and trains as ever. A norm that has one value
per channel, as after a pooling, uses its running statistics: one value has no spread.

Ranks have statistics of their own. Before any of them is used in training all ranks take the mean:
in such a step, and in one that not every rank computes, after which all have those of a rank that
did.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from rackrun.errors import UsageError
from training.ranks import Ranks


class BatchNorms:
    """The norms of a model whose statistics are this rank's own."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks
        self._norms = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
        }

    def share(self, fewest: int) -> None:
        """Give all ranks the same statistics if some rank has a single image, or none, in a part.

        `fewest`: the images that each part of each rank has at least.
        """
        if self._norms and fewest <= 1:
            self._ranks.share_statistics(self._model)

    @contextmanager
    def part(self, images: int) -> Iterator[None]:
        """Compute a part of this many images with the statistics that it has or else can use."""
        norms = self._norms if images == 1 else {}  # looked at in such a step only
        trained = {name: norm for name, norm in norms.items() if norm.training}
        if not trained:  # frozen ones use their running statistics anyway
            yield
            return
        hooks = [
            norm.register_forward_pre_hook(partial(_with_usable_statistics, name))
            for name, norm in trained.items()
        ]
        # Compiled code would not know of the hooks, and another compilation takes minutes.
        compiled = self._model._compiled_call_impl is not None
        try:
            with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
                yield
        finally:
            # The hooks have put norms of one value into evaluation mode, for this part alone.
            for norm, hook in zip(trained.values(), hooks, strict=True):
                hook.remove()
                norm.train()


def _with_usable_statistics(name: str, norm: nn.Module, inputs: tuple[torch.Tensor]) -> None:
    """Let a norm use its running statistics for one value per channel; UsageError if it has none.

    float (B, channels, ...)
    """
    assert isinstance(norm, _BatchNorm)
    norm.train(inputs[0].numel() > inputs[0].shape[1])
    if not norm.training and not norm.num_batches_tracked:
        raise UsageError(
            f"the batch norm {name} has one value per channel in a part of one image, and no"
            " statistics yet: type a larger --batch-size, or a smaller --grad-accum-steps"
        )
