"""A task of your own: ./run-local examples/own_task.py --data FOLDER"""

from dataclasses import dataclass

from torch import nn

from rackrun import Config, Task, Transforms


@dataclass(frozen=True)
class Settings(Config):
    """Train a small network of my own."""

    model: str = "small"
    """small, the only one."""
    width: int = 16
    """Channels of the network."""
    image_size: int = 32
    lr: float = 0.05


def build(config: Settings, classes: int) -> nn.Module:
    """Build the network for images of these classes."""
    layers = nn.Sequential(nn.Conv2d(3, config.width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(layers, nn.Flatten(), nn.Linear(config.width, classes))


def transforms(config: Settings, epoch: int) -> Transforms:
    """Return random crops for training, never mirrored."""
    return Transforms(config.image_size, crop_area=0.5, flip=False)


RECIPES = {"default": Settings}
TASK = Task("own_task", build, transforms)
