"""The recipes for any folder of classes: settings with names. None of this needs torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from rackrun.commandline.ranges import Between
from rackrun.training.config import Config
from rackrun.training.settings.data import CropArea
from rackrun.training.settings.optim import BODY, Optimizer, Shape

OWN_MODELS: tuple[str, ...] = ()
USUAL_SIDE = 224
Side = Annotated[int, Between(0, 4096, "between 8 and 4096 pixels")]


@dataclass(frozen=True)
class Classify(Config):
    """Fine-tune published weights to classify images of your own classes.

    Only the last layer trains for 2 epochs at 1e-3, then all layers at 1e-4; without weights, all
    layers from the start. The learning rate falls to a tenth when evaluations stop improving. After
    5 evaluations without improvement the run ends, and final.pt has the best weights. Accuracy: not
    measured; it depends on the images.
    """

    recipe: str = "default"
    """Set of defaults to start from: default, probe (the last layer only), scratch."""
    weights: str = "imagenet"
    image_size: Side = 0
    """Side of the square that the model sees, in pixels; 0: as the weights were published, or else
    224."""
    short_side: Side = 0
    """Shorter side before the center crop of evaluation, in pixels; 0: as the weights were
    published, or else 256/224 of --image-size."""
    crop_area: CropArea = 0.35
    """Smallest fraction of an image that a training crop keeps; 1: no random crops."""
    interpolation: Literal["auto", "bilinear", "bicubic"] = "auto"
    """Interpolation of resizing, always antialiased; auto: as the weights were published, or else
    bilinear."""

    epochs: int = 30
    batch_size: int = 32
    optimizer: Optimizer = "adamw"
    lr: float = 1e-4
    head_epochs: int = 2
    head_lr: float = 1e-3
    lr_schedule: Shape = "plateau"
    weight_decay: float = 0.01
    label_smoothing: float = 0.1
    patience: int = 5
    final: Literal["last", "best"] = "best"

    @property
    def side(self) -> int:
        """The side of the square that the model sees, in pixels."""
        return self.image_size or USUAL_SIDE

    def problems(self) -> list[str]:
        """Refuse sizes that no image can have."""
        problems = super().problems()
        if 0 < self.image_size < 8:
            problems.append(f"--image-size {self.image_size} is not between 8 and 4096 pixels")
        if 0 < self.short_side < self.side:
            problems.append(
                f"--short-side {self.short_side} is less than the square of {self.side} pixels that"
                " is cut out of it"
            )
        return problems


@dataclass(frozen=True)
class Probe(Classify):
    """Train only the last layer on top of published weights: the fastest way to a first result."""

    recipe: str = "probe"
    freeze: str = BODY
    head_epochs: int = 0
    lr: float = 1e-3
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Scratch(Classify):
    """Train from random weights, for many images or images unlike those of published weights.

    AdamW at 1e-3 with 5 epochs of warm-up and cosine decay over 100 epochs. Not measured.
    """

    recipe: str = "scratch"
    weights: str = ""
    epochs: int = 100
    lr: float = 1e-3
    head_epochs: int = 0
    lr_schedule: Shape = "cosine"
    warmup_epochs: float = 5.0
    weight_decay: float = 0.05
    patience: int = 0


RECIPES = {"default": Classify, "probe": Probe, "scratch": Scratch}
