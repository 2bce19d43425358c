"""A network whose steps cost little, to measure all but the model."""

from torch import nn


def net(num_classes: int) -> nn.Module:
    """Return one convolution and a linear layer, without batch norm."""
    convolution = nn.Conv2d(3, 8, 4, stride=4)
    layers = (convolution, nn.AdaptiveAvgPool2d(4), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(128, num_classes))
