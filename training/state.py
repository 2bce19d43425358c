"""The state that survives a restart, in one object."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pickle import PicklingError
from threading import Lock
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import get_total_norm
from torch.optim.swa_utils import get_ema_multi_avg_fn

from rackrun.errors import UserCodeError
from rackrun.terminal import one_line
from rackrun.training.config import Config
from rackrun.training.counts import Counts
from rackrun.training.layers import frozen_weights, resting_modules
from rackrun.training.optimizer import make_optimizer, regrouped
from rackrun.training.settings.optim import TuningSettings

PLATEAU_FACTOR = 0.1  # of the learning rate, with --lr-schedule plateau


class TrainingState:
    """Model, optimizer, loss scale, average of weights, position, latest and best accuracy.

    The schedule and everything random are functions of the step, so they need no state.
    """

    def __init__(self, model: nn.Module, config: Config, float16: bool = False) -> None:
        self.model = model
        self._config = config
        # What the task itself has frozen stays so in every stage.
        self._trainable = {name for name, each in model.named_parameters() if each.requires_grad}
        self._resting: list[nn.Module] = []  # in evaluation mode while others train
        self.optimizer = make_optimizer(model, config)
        device = next(model.parameters()).device
        self.scaler = GradScaler(device.type, enabled=float16)
        self._one, self._skipped = torch.ones((), device=device), torch.zeros((), device=device)
        self.average: Average | None = None
        if config.ema_decay:
            copied = copy_for_average(model, config)
            self.average = Average(copied, config.ema_decay, config.ema_steps)
        self.step = 0
        self.epoch = 0  # how many are done, evaluation included
        self.accuracy = 0.0
        self.improvement = Improvement()
        self._lock = Lock()
        self.is_whole = True
        """Whether it is that of the last step, and not on its way to the next one."""
        self.step_seconds = 0.0
        """The time between the last two steps."""
        self._changed = time.monotonic()

    @contextmanager
    def whole(self) -> Iterator[bool]:
        """Hold changes off, and yield whether the state is that of a whole step."""
        with self._lock:
            yield self.is_whole

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Take the state to the next step; after an error it is whole no more."""
        with self._lock:
            self.is_whole = False
            yield
            self.is_whole = True
        now = time.monotonic()
        self.step_seconds, self._changed = now - self._changed, now

    @property
    def best(self) -> float:
        """The best validation accuracy so far."""
        return self.improvement.accuracy

    @property
    def exhausted(self) -> bool:
        """Whether the run ends early: --patience evaluations in a row were none better."""
        return 0 < self._config.patience <= self.improvement.stale

    @property
    def evaluated(self) -> nn.Module:
        """The model that is evaluated and kept: the average where there is one."""
        return self.average.model if self.average else self.model

    @property
    def models(self) -> list[nn.Module]:
        """The model, and the average of its weights where there is one."""
        return [self.model, *([self.average.model] if self.average else [])]

    @property
    def is_finite(self) -> bool:
        """Whether all weights are finite numbers; waits for the GPU."""
        return bool(get_total_norm(self.model.parameters(), float("inf")).isfinite())

    def start_average(self) -> None:
        """Start the average at the weights that the model has now."""
        if self.average:
            self.average.model.load_state_dict(self.model.state_dict())

    def freeze(self, layers: Sequence[str], classes: int) -> None:
        """Train all layers from here on but these, which keep their weights and statistics."""
        frozen = frozen_weights(self.model, layers, classes)
        for name, weight in self.model.named_parameters():
            weight.requires_grad_(name in self._trainable and name not in frozen)
        self._resting = resting_modules(self.model, frozen)
        self.train()

    def train(self) -> None:
        """Put the model into training mode, except what is frozen."""
        self.model.train()
        for module in self._resting:
            module.eval()

    def set_lr(self, lr: float) -> float:
        """Give the optimizer the schedule's learning rate, less what plateaus took; return it."""
        lr *= self.improvement.lr_factor
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)  # a user's optimizer may make groups
        return lr

    def advance(self) -> None:
        """Take a step with the gradients, of all ranks by now.

        In float16 the scaler skips one whose gradients overflow: on all ranks, whose mean it sees.
        It counts as a step all the same: its samples are used, the schedule goes on.
        """
        before = self.scaler.scale(self._one)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.is_enabled():
            # Only a smaller scale shows a step that was skipped; no step waits for the comparison.
            self._skipped += self.scaler.scale(self._one) < before
        self.optimizer.zero_grad()
        if self.average:
            self.average.update(self.model, self.step)
        self.step += 1

    @property
    def loss_scale(self) -> float:
        """The scale of the loss in float16, else 0; waits for the device."""
        return self.scaler.get_scale() if self.scaler.is_enabled() else 0.0

    def take_skipped_steps(self) -> int:
        """Return the steps that float16 has skipped since the last call; waits for the device."""
        skipped = int(self._skipped) if self.scaler.is_enabled() else 0
        self._skipped.zero_()
        return skipped

    def finish_epoch(self, evaluation: Counts | None) -> bool:
        """Count an epoch; return whether its evaluation, if it had one, is the best so far."""
        self.epoch += 1
        if not evaluation:
            return False
        self.accuracy = evaluation.accuracy
        return self.improvement.update(evaluation, self._config, self.epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as plain data and tensors."""
        # No generator of random numbers: what is drawn follows from seed, step and rank.
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loss_scale": self.scaler.state_dict(),
            "average": self.average.model.state_dict() if self.average else None,
            "step": self.step,
            "epoch": self.epoch,
            "accuracy": self.accuracy,
            "best": self.best,
            "improvement": asdict(self.improvement),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.model.load_state_dict(state["model"])
        saved = regrouped(state["optimizer"], self.optimizer)
        self.optimizer.load_state_dict(saved)
        if state["loss_scale"]:  # of a run without float16 there is none
            self.scaler.load_state_dict(state["loss_scale"])
        if self.average:
            self.average.model.load_state_dict(state["average"] or state["model"])
        self.step = state["step"]
        self.epoch = state["epoch"]
        self.accuracy = state["accuracy"]
        self.improvement = Improvement(**state["improvement"])


def copy_for_average(model: nn.Module, config: Config) -> nn.Module:
    """Return a copy of the model; UserCodeError for one of which no average can be kept."""
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError, ValueError, AttributeError, PicklingError) as error:
        raise UserCodeError(
            f"--model {config.model}: cannot be copied, as --ema-decay needs:"
            f" {one_line(str(error))[:200]}; leave --ema-decay out, or change the model (for"
            " torch.nn.utils.weight_norm, use torch.nn.utils.parametrizations.weight_norm)"
        ) from None


class Average:
    """The exponential moving average (EMA) in a copy of the model, whose weights follow it slowly.

    Not torch's AveragedModel, for two reasons. That asks the device at every step whether its count
    of updates is 0, so that each step would wait for the GPU; and at the first update it copies the
    weights, where this average moves towards them as at every other.
    """

    def __init__(self, model: nn.Module, decay: float, every: int) -> None:
        self.model = model.requires_grad_(False).eval()
        self.decay = decay
        self.every = every

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Move towards the model after this step, if it is due; faster at first than later."""
        number, waits = divmod(step, self.every)
        if waits:
            return
        share = 1 - min(self.decay, (1 + number) / (10 + number))
        # torch's, of all tensors in one kernel; its decay is one for all steps, hence made anew.
        move: Callable[..., None] = get_ema_multi_avg_fn(1 - share)  # type: ignore[no-untyped-call]
        copy_all: Callable[..., None] = get_ema_multi_avg_fn(0.0)  # type: ignore[no-untyped-call]
        move(list(self.model.parameters()), list(model.parameters()), None)
        pairs = list(zip(self.model.buffers(), model.buffers(), strict=True))
        floats = [pair for pair in pairs if pair[0].is_floating_point()]
        if floats:
            copy_all(*map(list, zip(*floats, strict=True)), None)
        for ours, theirs in pairs:
            if not ours.is_floating_point():
                ours.copy_(theirs)


@dataclass
class Improvement:
    """Evaluations compared by accuracy, and by loss where that is equal.

    All ranks have the same counts, summed over all of them, so all come to the same decisions.
    """

    accuracy: float = 0.0  # of the best evaluation
    loss: float = float("inf")  # of the best evaluation
    epoch: int = 0  # epochs that were done at the best evaluation; 0: there is none yet
    stale: int = 0  # evaluations since the best one
    waited: int = 0  # evaluations since the best one, or since the learning rate fell
    lr_factor: float = 1.0  # of the schedule's learning rate

    def update(self, evaluation: Counts, config: TuningSettings, epoch: int) -> bool:
        """Count the evaluation after this many epochs; return whether it is as good as the best.

        While only the last layer trains (--head-epochs), none counts as stale.
        """
        score = (evaluation.accuracy, -evaluation.mean_loss)
        best_score = (self.accuracy, -self.loss)
        if score >= best_score:
            self.accuracy, self.loss = evaluation.accuracy, evaluation.mean_loss
            self.epoch = epoch
        if score > best_score or epoch <= config.head_epochs:
            self.stale = self.waited = 0
        else:
            self.stale += 1
            self.waited += 1
        if self.waited >= config.plateau_epochs and config.lr_schedule == "plateau":
            self.lr_factor *= PLATEAU_FACTOR
            self.waited = 0
        return score >= best_score
