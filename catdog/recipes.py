"""The recipes for cats and dogs: settings with names. None of this needs torch."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from rackrun.commandline.conditions import Condition
from rackrun.commandline.ranges import Between
from rackrun.training.config import Config
from rackrun.training.settings.data import CropArea
from rackrun.training.settings.optim import Optimizer, Shape

OWN_MODELS = ("catdog", "reference")
OF_THE_MODEL = ("width", "gray")
"""Settings without which a checkpoint does not fit the model."""


@dataclass(frozen=True)
class CatDog(Config):
    """Train a small network on images of cats and dogs, or of your own classes.

    A residual network on color images, trained with AdamW, cosine decay, random crops and a moving
    average of the weights. Accuracy on the photos of cats and dogs: not measured.
    """

    recipe: str = "default"
    """Set of defaults to start from: default, demo (narrow, for a CPU), reference."""
    model: str = "catdog"
    """catdog (see --width), reference, or any classification model of torchvision."""
    width: Annotated[int, Between(1, 4096, "between 1 and 4096 channels")] = 64
    """Channels of the catdog model's first stage."""
    gray: bool = False
    """Show the model grayscale images."""
    crop_area: CropArea = 0.35
    """Smallest fraction of an image that a training crop keeps; 1: no random crops."""
    own_conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("width",),
            lambda config: config.model == "catdog",
            "--model is {config.model}",
            "--model catdog",
        ),
    )

    image_size: int = 128
    epochs: int = 30
    batch_size: int = 64
    optimizer: Optimizer = "adamw"
    lr: float = 2e-3
    warmup_epochs: float = 2.0
    weight_decay: float = 0.05
    label_smoothing: float = 0.1
    ema_decay: float = 0.998


@dataclass(frozen=True)
class DemoRecipe(CatDog):
    """Train a narrow model on the drawn cats and dogs, in a few minutes on two CPU cores.

    All of 400 unseen drawings are right after 10 epochs of 3,600: 3:42 minutes on two cores of a
    shared machine.
    """

    recipe: str = "demo"
    width: int = 16
    image_size: int = 96
    epochs: int = 10
    batch_size: int = 32
    lr: float = 3e-3
    crop_area: float = 0.6
    warmup_epochs: float = 0.5
    label_smoothing: float = 0.0
    ema_decay: float = 0.98


@dataclass(frozen=True)
class Reference(CatDog):
    """Train the reference network on gray images of 128 x 128, as in the published sample.

    SGD 1e-3 without momentum, 32 images per rank and step, 50 epochs. It costs 26.5 GFLOP per
    image, more than a ResNet-50. Accuracy: not measured.
    """

    recipe: str = "reference"
    model: str = "reference"
    gray: bool = True
    crop_area: float = 1.0
    flip: bool = False
    epochs: int = 50
    batch_size: int = 32
    optimizer: Optimizer = "sgd"
    lr: float = 1e-3
    lr_schedule: Shape = "constant"
    momentum: float = 0.0
    weight_decay: float = 0.0
    warmup_epochs: float = 0.0
    label_smoothing: float = 0.0
    ema_decay: float = 0.0


RECIPES = {"default": CatDog, "demo": DemoRecipe, "reference": Reference}
