"""The state that survives a restart, in one object; and its form as bytes."""

import io
from typing import Any

import torch
from torch import nn

from training.config import OptimSettings
from training.counts import Counts
from training.optim.ema import Average
from training.optim.groups import regrouped
from training.optim.optimizer import make_optimizer


class TrainingState:
    """Model, optimizer, average of weights, position, latest and best validation accuracy.

    The schedule and everything random are functions of the step, so they need no state.
    """

    def __init__(self, model: nn.Module, config: OptimSettings) -> None:
        self.model = model
        self.optimizer = make_optimizer(model, config)
        self.average = Average(model, config.ema_decay) if config.ema_decay else None
        self.step = 0
        self.epoch = 0  # how many are done, evaluation included
        self.accuracy = 0.0
        self.best = 0.0

    @property
    def evaluated(self) -> nn.Module:
        """Return the model that is evaluated and kept: the average where there is one."""
        return self.average.model if self.average else self.model

    def start_average(self) -> None:
        """Start the average at the weights that the model has now."""
        if self.average:
            self.average.model.load_state_dict(self.model.state_dict())

    def set_lr(self, lr: float) -> float:
        """Give the optimizer the learning rate of the coming step, and return it."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)  # older checkpoints have none
        return lr

    def advance(self) -> None:
        """Take a step with the gradients that are there."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average:
            self.average.update(self.model, self.step)
        self.step += 1

    def finish_epoch(self, evaluation: Counts | None) -> bool:
        """Count an epoch; return whether its evaluation, if it had one, is the best so far."""
        self.epoch += 1
        if not evaluation:
            return False
        self.accuracy = evaluation.accuracy
        is_best = self.accuracy >= self.best
        self.best = max(self.best, self.accuracy)
        return is_best

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as plain data and tensors."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.model.state_dict() if self.average else None,
            "step": self.step,
            "epoch": self.epoch,
            "accuracy": self.accuracy,
            "best": self.best,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.model.load_state_dict(state["model"])
        saved = regrouped(state["optimizer"], self.optimizer, self.model)
        self.optimizer.load_state_dict(saved)
        if self.average:
            self.average.model.load_state_dict(state["average"] or state["model"])
        self.step = state["step"]
        self.epoch = state["epoch"]
        self.accuracy = state["accuracy"]
        self.best = state["best"]


def pack(content: dict[str, Any]) -> bytes:
    """Return plain data and tensors as bytes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> dict[str, Any]:
    """Return what was packed, on the CPU; code in it is not run but refused."""
    content: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return content
