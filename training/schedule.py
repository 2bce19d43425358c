"""The schedule of a run in steps: when to log, evaluate and save, and the learning rate."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from rackrun.errors import UsageError
from rackrun.training.config import Config
from rackrun.training.settings.optim import BODY
from rackrun.user_code.imports import imported, is_import_path

SCALED_BATCH = 8192
"""Images per step up to which a ResNet-50 kept its accuracy when SGD's learning rate was scaled
with the batch (Goyal et al., 2017, arXiv:1706.02677); with more it lost some."""
SCALED_LR = 3.2
"""The learning rate that this took: 0.1 for 256 images."""


FIRST_LOGGED = (1, 2, 5, 10)
"""Steps that are logged, too, where no interval was chosen: so a small data set or slow steps show
a loss soon, and the first one tells whether the model begins where it should."""


def due(step: int, every: int, total: int) -> bool:
    """Return True at every `every`-th step, and at the last one."""
    return step == total or (every > 0 and step % every == 0)


@dataclass(frozen=True)
class Stage:
    """Consecutive epochs in which the same layers train, each stage with its own lr schedule."""

    first: int
    last: int
    """The epoch after the stage's last one."""
    peak: float
    frozen: tuple[str, ...] = ()
    """The layers that keep their weights."""


class Schedule:
    """The run in steps: epochs, minutes of warm-up and the like are converted here, once."""

    def __init__(self, config: Config, epoch_steps: int, world: float) -> None:
        """Plan epochs of this many steps; `world` is how many times --batch-size a step has."""
        self._config = config
        self.epoch_steps = epoch_steps
        self.steps = config.epochs * epoch_steps
        self.evaluate = config.eval_every_epochs * epoch_steps
        self.save = config.save_every_epochs * epoch_steps
        self.warmup = round(min(config.warmup_epochs, config.epochs / 2) * epoch_steps)
        self.decay = config.step_epochs * epoch_steps
        self.stages = _stages(config, world if config.scale_lr else 1)
        self._user_schedule: Callable[..., object] | None = None
        if is_import_path(name := config.lr_schedule):
            # (step, steps) after a stage's warm-up -> share of its peak
            self._user_schedule = imported("--lr-schedule", name, "triangle", "step", "steps")

    @property
    def peak(self) -> float:
        """The highest learning rate of the last stage."""
        return self.stages[-1].peak

    def stage(self, epoch: int) -> Stage:
        """Return the stage after this many epochs; after all of them, the last one."""
        return self.stages_from(epoch)[0]

    def stages_from(self, epoch: int) -> tuple[Stage, ...]:
        """Return the stages that are not over after this many epochs, and always the last one."""
        return tuple(s for s in self.stages if epoch < s.last) or self.stages[-1:]

    def lr(self, step: int) -> float:
        """Return the learning rate of the step with this number, counted from 0."""
        stage = self.stage(step // self.epoch_steps)
        steps = (stage.last - stage.first) * self.epoch_steps
        warmup = min(self.warmup, round(steps / 2))
        step -= stage.first * self.epoch_steps
        if step < warmup:
            return stage.peak * (step + 1) / warmup
        return stage.peak * self._share(step, warmup, steps)

    def _share(self, step: int, warmup: int, steps: int) -> float:
        shape, done = self._config.lr_schedule, (step - warmup) / max(steps - warmup, 1)
        if self._user_schedule:
            after, total = step - warmup, steps - warmup
            share = self._user_schedule(step=after, steps=total)
            if not isinstance(share, int | float) or not 0 <= share < math.inf:
                raise UsageError(
                    f"--lr-schedule {shape}: {share!r} at step {after} of {total}: return the"
                    " share of --lr, a number from 0 on"
                )
            return float(share)
        if shape == "step":
            return 0.1 ** (step // self.decay)
        if shape == "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        if shape == "linear":
            return 1 - done
        if shape == "polynomial":
            return (1 - done) ** 2
        return 1.0  # constant; on a plateau evaluations decide, see training/state.py

    def logs(self, step: int, epoch_end: int) -> bool:
        """Return whether the steps up to this one are logged."""
        every = self._config.log_every_steps
        is_first = every == Config.log_every_steps and step in FIRST_LOGGED
        return is_first or due(step, every, epoch_end)

    def epoch(self, step: int) -> float:
        """Return this many steps as epochs."""
        return step / self.epoch_steps


def _stages(config: Config, scale: float) -> tuple[Stage, ...]:
    frozen = tuple(name for name in config.freeze.split(",") if name)
    head = min(config.head_epochs, config.epochs)
    stages = (
        Stage(0, head, config.head_lr * scale, (BODY, *frozen)),
        Stage(head, config.epochs, config.lr * scale, frozen),
    )
    return tuple(stage for stage in stages if stage.first < stage.last)


def most_ranks(config: Config) -> tuple[int, str]:
    """Return the ranks that these settings are for at most, 0 for any number, and why not more."""
    if config.global_batch:
        text = f"--global-batch {config.global_batch} has fewer samples than that"
        return config.global_batch, text
    return _largest_scale(config)


def refuse_scale(config: Config, batch: int) -> None:
    """Raise UsageError where --scale-lr has more images per step than it is known to hold for."""
    scale, why = _largest_scale(config)
    if scale and batch > scale * config.batch_size:
        raise UsageError(f"{batch:,} images per step: {why}")


def _largest_scale(config: Config) -> tuple[int, str]:
    # How many times --batch-size and --lr may be taken, 0 for any number, and why not more.
    if not config.scale_lr or config.optimizer != "sgd" or config.synthetic:
        return 0, ""
    by_rate = int(SCALED_LR * 1.001 / config.lr) if config.lr else SCALED_BATCH  # rounding
    return max(1, min(SCALED_BATCH // config.batch_size, by_rate)), (
        f"--scale-lr is known to hold up to lr {SCALED_LR:g} and {SCALED_BATCH:,} images per step;"
        " type a smaller --batch-size and --lr, or --no-scale-lr --lr"
        f" {SCALED_LR:g}, or what you have tried"
    )
