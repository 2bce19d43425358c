"""The models and transforms for cats and dogs."""

from dataclasses import replace

import torch
from torch import nn

from rackrun.catdog.recipes import OWN_MODELS, CatDog
from rackrun.errors import UsageError
from rackrun.training.data.transforms import Transforms, augmented
from rackrun.training.models.named import named_model, normalized_for
from rackrun.training.task import Task


class ReferenceNet(nn.Module):
    """The reference network: gray images of 128 x 128, 2,662,146 parameters.

    float (B, 1, 128, 128) -> (B, 64, 64, 64) -> (B, 512, 32, 32) -> (B, 512, 2, 2) -> (B, classes)

    The last block is applied four times with the same weights. Batch norm follows ReLU.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = halving_block(1, 64)
        self.second = halving_block(64, 512)
        self.repeated = halving_block(512, 512)
        self.head = nn.Linear(512 * 2 * 2, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of each class: float (B, classes)."""
        features = self.second(self.first(images))
        for _ in range(4):
            features = self.repeated(features)
        logits: torch.Tensor = self.head(features.flatten(1))
        return logits


def halving_block(inside: int, outside: int) -> nn.Sequential:
    """Build a convolution, ReLU, batch norm, and a pool that halves both sides."""
    return nn.Sequential(
        nn.Conv2d(inside, outside, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.BatchNorm2d(outside),
        nn.MaxPool2d(2),
    )


class CatDogNet(nn.Module):
    """A small residual network for images of any size, gray or RGB.

    float (B, channels, S, S) -> (B, w, S/4, S/4) -> (B, 2w, S/8, S/8) -> (B, 4w, S/16, S/16)
    -> (B, 8w, S/32, S/32) -> mean over the image -> (B, classes)
    """

    def __init__(self, classes: int, channels: int, width: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.stem = nn.Sequential(normed(channels, width, stride=2), nn.ReLU())
        self.stages = nn.Sequential(
            *(Residual(a, b) for a, b in zip([width, *widths], widths, strict=False))
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of each class: float (B, classes)."""
        features = self.stages(self.stem(images))
        logits: torch.Tensor = self.head(features.mean((2, 3)))
        return logits


class Residual(nn.Module):
    """Two convolutions around which the input is carried; both sides are halved."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            normed(inside, outside, stride=2), nn.ReLU(), normed(outside, outside, stride=1)
        )
        self.carry = nn.Sequential(nn.AvgPool2d(2, ceil_mode=True), nn.Conv2d(inside, outside, 1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Halve both sides: float (B, inside, S, S) -> (B, outside, S/2, S/2)."""
        return torch.relu(self.path(features) + self.carry(features))


def normed(inside: int, outside: int, stride: int) -> nn.Sequential:
    """Build a 3 x 3 convolution with batch norm."""
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outside)
    )


def build(config: CatDog, classes: int) -> nn.Module:
    """Build the model that the settings name."""
    if config.model == "reference":
        if not config.gray or config.image_size != 128:
            raise UsageError("--model reference takes --gray images of --image-size 128")
        if config.model_args:
            raise UsageError(f"--model-args {config.model_args}: --model reference takes none")
        return ReferenceNet(classes)
    if config.model == "catdog":
        if config.model_args:
            raise UsageError(f"--model-args {config.model_args}: --model catdog takes none")
        return CatDogNet(classes, channels=1 if config.gray else 3, width=config.width)
    if config.gray:
        raise UsageError(f"--model {config.model} takes color images: leave out --gray")
    return named_model(
        config.model, classes, config.image_size, OWN_MODELS, args=config.builder_args
    )


def transforms(config: CatDog, epoch: int) -> Transforms:
    """Return random crops for training, the whole image squeezed to a square for evaluation."""
    crops = Transforms(config.image_size, crop_area=config.crop_area)
    if config.gray:
        gray = replace(crops, channels=1, mean=(0.45,), deviation=(0.25,))
        return augmented(gray, config)
    return augmented(normalized_for(config.model, crops), config)


TASK = Task(name="catdog", model=build, transforms=transforms)
