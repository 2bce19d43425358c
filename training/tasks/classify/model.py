"""The models and transforms for any folder of classes."""

from torch import nn

from training.data.transforms import Transforms, augmented
from training.models.named import named_model, normalised_for
from training.task import Task
from training.tasks.classify.recipes import Classify

SYNTHETIC_CLASSES = 10


def build(config: Classify, classes: int) -> nn.Module:
    """Build the model that the settings name."""
    return named_model(config.model, classes, config.image_size)


def transforms(config: Classify, epoch: int) -> Transforms:
    """Return random crops for training, the centre for evaluation: 224 of 256 pixels."""
    crops = Transforms(
        size=config.image_size,
        short_side=round(config.image_size * 256 / 224),
        crop_area=config.crop_area,
        interpolation=config.interpolation,
    )
    return augmented(normalised_for(config.model, crops), config)


TASK = Task(
    name="classify", model=build, transforms=transforms, synthetic_classes=SYNTHETIC_CLASSES
)
