"""The exponential moving average of the weights (EMA).

torch's AveragedModel would do, but for two things: it asks the device at every step whether its
count of updates is 0, so that each step would wait for the GPU, and at the first update it copies
the weights, where this average moves towards them as at every other.
"""

from __future__ import annotations

import copy

import torch
from torch import nn


class Average:
    """A copy of the model whose weights follow the model's slowly."""

    def __init__(self, model: nn.Module, decay: float, every: int) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.decay = decay
        self.every = every

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Move towards the model after this step, if it is due; faster at first than later."""
        number, waits = divmod(step, self.every)
        if waits:
            return
        share = 1 - min(self.decay, (1 + number) / (10 + number))
        torch._foreach_lerp_(list(self.model.parameters()), list(model.parameters()), share)
        if buffers := list(model.buffers()):
            torch._foreach_copy_(list(self.model.buffers()), buffers)
