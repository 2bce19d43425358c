"""The model and the transforms for MNIST."""

import torch
from torch import nn

from rackrun.errors import UsageError
from rackrun.mnist.recipes import Mnist
from rackrun.training.data.transforms import Transforms, augmented
from rackrun.training.task import Task

SIDE = 28


class MnistNet(nn.Module):
    """Three convolutions without padding and two dense layers: 93,322 parameters for 10 classes.

    float (B, 1, 28, 28) -> (B, 32, 13, 13) -> (B, 64, 5, 5) -> (B, 64, 3, 3) -> (B, classes)
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 32, kernel_size=3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, kernel_size=3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 64, kernel_size=3), nn.ReLU(), nn.Flatten()),
        )
        self.head = nn.Sequential(nn.Linear(64 * 3 * 3, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of each class: float (B, classes)."""
        logits: torch.Tensor = self.head(self.features(images))
        return logits


def build(config: Mnist, classes: int) -> nn.Module:
    """Build the network; UsageError for another size."""
    if config.image_size != SIDE:
        raise UsageError(f"--image-size {config.image_size}: --model mnist takes {SIDE}")
    if config.model_args:
        raise UsageError(f"--model-args {config.model_args}: --model mnist takes none")
    return MnistNet(classes)


def transforms(config: Mnist, epoch: int) -> Transforms:
    """Return the whole image, normalized by mean and deviation of MNIST."""
    mean, deviation = (0.1307,), (0.3081,)
    whole = Transforms(config.image_size, channels=1, mean=mean, deviation=deviation)
    return augmented(whole, config)


TASK = Task(name="mnist", model=build, transforms=transforms, synthetic_classes=10)
