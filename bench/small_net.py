"""A network whose steps cost little, or take a given time, to measure all but the model."""

import os
import time

import torch
from torch import nn

STEP_SECONDS = "STEP_SECONDS"
"""The variable with the seconds that each training step waits, as for a GPU."""


class Waits(nn.Identity):
    """Takes the time of a step."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the images; in training, after STEP_SECONDS."""
        time.sleep(float(os.environ.get(STEP_SECONDS, 0)) if self.training else 0)
        return images


def net(num_classes: int) -> nn.Module:
    """Return one convolution and a linear layer, without batch norm."""
    convolution = nn.Conv2d(3, 8, 4, stride=4)
    layers = (Waits(), convolution, nn.AdaptiveAvgPool2d(4), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(128, num_classes))
