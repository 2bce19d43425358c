"""The models and transforms for any folder of classes."""

from dataclasses import replace

from torch import nn

from rackrun.contract.files import PUBLISHED
from rackrun.training.data.transforms import Transforms, augmented
from rackrun.training.models.named import named_model, normalized_for, published_images
from rackrun.training.task import Task
from rackrun.training.tasks.classify.recipes import Classify

SYNTHETIC_CLASSES = 10


def build(config: Classify, classes: int) -> nn.Module:
    """Build the model that the settings name."""
    return named_model(config.model, classes, config.side, args=config.builder_args)


def resolve(config: Classify) -> Classify:
    """Return settings with the size, crop and kernel that published weights were trained for."""
    published = published_images(config.model) if config.weights == PUBLISHED else None
    if not published:
        return config
    side = config.image_size or published.side
    short_side = config.short_side or max(side, round(side * published.short_side / published.side))
    interpolation = config.interpolation
    if interpolation == "auto":
        interpolation = published.interpolation
    return replace(config, image_size=side, short_side=short_side, interpolation=interpolation)


def transforms(config: Classify, epoch: int) -> Transforms:
    """Return random crops for training, the center for evaluation: usually 224 of 256 pixels."""
    crops = Transforms(
        size=config.side,
        short_side=config.short_side or round(config.side * 256 / 224),
        crop_area=config.crop_area,
        interpolation="bilinear" if config.interpolation == "auto" else config.interpolation,
    )
    return augmented(normalized_for(config.model, crops), config)


TASK = Task(
    name="classify",
    model=build,
    transforms=transforms,
    synthetic_classes=SYNTHETIC_CLASSES,
    resolve=resolve,
)
