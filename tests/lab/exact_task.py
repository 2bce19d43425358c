"""A task of one's own whose model computes in float64, so that only true differences show."""

import os
import time
from dataclasses import dataclass

import torch
from torch import nn

from rackrun import Config, Task, Transforms


@dataclass(frozen=True)
class Exact(Config):
    """Train a small model on exact epochs of global batches."""

    model: str = "double"
    """double, the only one."""
    norm: bool = False
    """With norms over pixels, and over a single value of each image."""
    misdeed: str = ""
    """RANK,STEP,SIGNAL: a rank that sends itself a signal in a step; error: whoever has images."""
    seconds: str = ""
    """How long the ranks compute for an image: a number for each."""

    epochs: int = 2
    batch_size: int = 16
    global_batch: int = 16
    exact_epochs: bool = True
    lr: float = 0.05
    momentum: float = 0.9
    clip_grad: float = 0.5
    ema_decay: float = 0.5
    weight_decay: float = 0.01
    workers: int = 0
    device: str = "cpu"
    precision: str = "fp32"
    tensorboard: bool = False


class Double(nn.Module):
    """Convolution and two layers, and what the task has it do."""

    def __init__(self, config: Exact, classes: int) -> None:
        super().__init__()
        parts = (nn.Flatten(), nn.Linear(4 * 6 * 6, 8), nn.Tanh())
        if config.norm:
            pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 8), nn.BatchNorm1d(8))
            parts = (nn.BatchNorm2d(4), nn.ReLU(), *pooled)
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), *parts, nn.Linear(8, classes)).double()
        self.misdeed, self.steps = config.misdeed.split(","), 0
        self.most = config.batch_size
        seconds = [float(each) for each in config.seconds.split(",") if each]
        self.seconds = seconds[int(os.environ["RANK"])] if seconds else 0.0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(images.double())
        self.steps += self.training
        if self.training and len(images):
            assert len(images) <= self.most
            time.sleep(len(images) * self.seconds)
            self.misbehave()
        return outputs

    def misbehave(self) -> None:
        """Do what was asked for, once the outputs are there, before other ranks get gradients."""
        rank, step, what = [*self.misdeed, "", "", ""][:3]
        if step == str(self.steps) and rank in ("any", os.environ["RANK"]):
            if what == "error":
                raise ValueError("failed in this step")
            os.kill(os.getpid(), int(what))


def build(config: Exact, classes: int) -> nn.Module:
    """Build the model, with the same weights in every run."""
    torch.manual_seed(5)
    torch.set_num_threads(1)
    return Double(config, classes)


def transforms(config: Exact, epoch: int) -> Transforms:
    """Return random crops of eight pixels."""
    return Transforms(8, crop_area=0.5)


RECIPES = {"default": Exact}
TASK = Task("exact_task", build, transforms)
