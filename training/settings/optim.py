"""How the weights change: optimizer, loss, learning rate and its schedule, frozen layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from rackrun.commandline.options import Values
from rackrun.commandline.ranges import Between, Count, Positive, Share
from rackrun.training.settings import Slice, option
from rackrun.user_code.imports import is_import_path
from rackrun.user_code.sources import did_you_mean

OPTIMIZERS = ("sgd", "adamw", "lamb")
SHAPES = ("cosine", "linear", "polynomial", "step", "constant", "plateau")
Optimizer = Annotated[str, Values(f"{{{','.join(OPTIMIZERS)},MODULE:NAME}}")]
Shape = Annotated[str, Values(f"{{{','.join(SHAPES)},MODULE:NAME}}")]
LearningRate = Annotated[float, Between(0, 1e6, "a learning rate")]
BODY = "body"  # to --freeze: all layers but the last


@dataclass(frozen=True)
class TuningSettings(Slice):
    """Fine-tuning, learning rate schedule and early stopping."""

    freeze: Annotated[str, Values("LAYERS")] = ""
    """Layers that keep their weights, by name, comma-separated: features.conv0,features.norm0;
    `body`: all but the last layer."""
    head_epochs: Count = 0
    """Epochs at the start in which only the last layer trains."""
    head_lr: LearningRate = 1e-3
    """Peak learning rate during --head-epochs."""
    lr_schedule: Shape = "cosine"
    """How the learning rate falls after the warm-up; `polynomial`: with the square of the fraction
    of remaining steps; `plateau`: to a tenth when evaluations stop improving; your own as
    `my_schedules:triangle`, called with step and steps."""
    plateau_epochs: Positive = 2
    """Schedule `plateau`: evaluations without improvement before the learning rate falls."""
    patience: Count = 0
    """End the run after this many evaluations in a row without improvement (early stopping); 0:
    never."""

    def problems(self) -> list[str]:
        """Refuse a schedule that does not exist."""
        return [*super().problems(), *_unknown("lr_schedule", self.lr_schedule, SHAPES)]


@dataclass(frozen=True)
class OptimSettings(Slice):
    """Optimizer, learning rate and loss."""

    decays_all: ClassVar[bool] = False
    """Whether a recipe decays norms, biases and the like, too."""

    optimizer: Optimizer = "sgd"
    """Update rule (lamb is timm's), or your own as `my_optimizers:lion`, called with params and
    lr."""
    lr: LearningRate = 0.1
    """Peak learning rate."""
    scale_lr: bool = False
    """Multiply --lr by the number of ranks."""
    warmup_epochs: Annotated[float, Between(0)] = 0.0
    """Epochs of linear warm-up of the learning rate; at most half of the run."""
    step_epochs: Positive = 30
    """Schedule `step`: divide the learning rate by ten each time after this many epochs."""
    momentum: Annotated[float, Between(0, 0.9999)] = 0.9
    """Momentum of sgd; 0: none."""
    nesterov: bool = True
    """Nesterov momentum; --no-nesterov: plain momentum."""
    weight_decay: Annotated[float, Between(0, 1e6, "0 or more")] = 5e-5
    """Weight decay; norms, biases, embeddings, class tokens, bias tables and scales have none."""
    layer_decay: Annotated[float, Between(0.01, 1)] = 1.0
    """Learning rate of each layer, as a fraction of the next layer's; 1: the same for all."""
    loss: Literal["ce", "bce"] = "ce"
    """ce: cross-entropy over the classes; bce: mean binary cross-entropy of the classes."""
    bce_threshold: Share = 0.0
    """Loss `bce`: mixed targets above this count as 1, the others as 0; 0: as they are."""
    label_smoothing: Share = 0.0
    """Fraction of the target to spread evenly over all classes."""
    loss_weights: Annotated[str, Values("WEIGHTS")] = ""
    """Weight of each class in the loss: cat=2,dog=0.5, or `balanced`: by the inverse of its number
    of training samples."""
    clip_grad: Annotated[float, Between(0)] = 0.0
    """Maximum norm of the gradient, which is clipped to it; 0: no clipping."""
    ema_decay: Annotated[float, Between(0, 0.999999)] = 0.0
    """Decay of the moving average of the weights (EMA), which is evaluated and saved; 0: none."""
    ema_steps: Positive = 1
    """Steps between updates of the EMA."""

    def problems(self) -> list[str]:
        """Refuse an optimizer that does not exist."""
        return [*super().problems(), *_unknown("optimizer", self.optimizer, OPTIMIZERS)]


def _unknown(name: str, value: str, standard_names: Sequence[str]) -> list[str]:
    if value in standard_names or is_import_path(value):
        return []
    return [
        f"{option(name)} {value}: not one of {', '.join(standard_names)}, or"
        f" your own as MODULE:NAME{did_you_mean(value, standard_names)}"
    ]
