"""The scale of the loss under float16, in which small gradients vanish and large ones overflow.

torch's GradScaler scales the loss, skips a step whose gradients overflow, and scales by less from
there on. Gradients are averaged over all ranks first, so that an overflow on one of them reaches
all, and all skip the same steps. Without float16 nothing of this happens.

A skipped step counts as a step: its samples are used, the schedule goes on. Nothing here waits for
the device before `take`.
"""

from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from training.counts import Scaling


class LossScale:
    """Scales losses and takes steps with their gradients."""

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self._scaler = GradScaler(device.type, enabled=enabled)
        self._one = torch.ones((), device=device)
        self._skipped = torch.zeros((), device=device)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of the scaled loss to those that are there."""
        torch.autograd.backward(self._scaler.scale(loss))

    def unscale(self, optimizer: Optimizer) -> None:
        """Undo the scale of the gradients, as their norm has to be known."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Take a step with the gradients, or skip it where they overflow."""
        if not self._scaler.is_enabled():
            optimizer.step()
            return
        before = self._scaler.scale(self._one)
        self._scaler.step(optimizer)
        self._scaler.update()
        self._skipped += self._scaler.scale(self._one) < before

    def drop_step(self) -> None:
        """Forget gradients that were unscaled for a step which is not taken."""
        if self._scaler.is_enabled():
            self._scaler._per_optimizer_states.clear()

    def take(self) -> Scaling | None:
        """Return the scale and the steps skipped since the last call; None without float16."""
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
