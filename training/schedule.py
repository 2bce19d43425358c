"""When things happen, counted in steps, the only clock of the loop; and the rate at each step."""

import math
from dataclasses import dataclass

from training.config import Config


def due(step: int, every: int, total: int) -> bool:
    """Return whether something that happens every few steps happens now, as at the last step."""
    return step == total or (every > 0 and step % every == 0)


@dataclass(frozen=True)
class Schedule:
    """The run in steps: epochs, minutes of warm-up and the like are converted here, once."""

    epoch_steps: int
    steps: int
    log: int
    evaluate: int
    save: int
    warmup: int
    decay: int
    shape: str
    power: float
    peak: float

    def lr(self, step: int) -> float:
        """Return the learning rate of the step with this number, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.shape == "constant":
            return self.peak
        if self.shape == "step":
            return self.peak * 0.1 ** (step // self.decay)
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        if self.shape == "cosine":
            return self.peak * 0.5 * (1 + math.cos(math.pi * done))
        return self.peak * (1 - done) ** (1 if self.shape == "linear" else self.power)

    def epoch(self, step: int) -> float:
        """Return this many steps as epochs."""
        return step / self.epoch_steps


def make_schedule(config: Config, epoch_steps: int, world: float) -> Schedule:
    """Return the schedule of a run with epochs of this many steps, on this many ranks."""
    return Schedule(
        epoch_steps=epoch_steps,
        steps=config.epochs * epoch_steps,
        log=config.log_every_steps,
        evaluate=config.eval_every_epochs * epoch_steps,
        save=config.save_every_epochs * epoch_steps,
        warmup=round(min(config.warmup_epochs, config.epochs / 2) * epoch_steps),
        decay=config.step_epochs * epoch_steps,
        shape=config.lr_schedule,
        power=config.lr_power,
        peak=config.lr * (world if config.scale_lr else 1),
    )
