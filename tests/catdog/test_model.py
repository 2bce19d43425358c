"""The models for cats and dogs."""

import pytest
import torch
from torch import nn

from rackrun.catdog.model import TASK, CatDogNet, ReferenceNet, build
from rackrun.catdog.recipes import CatDog, DemoRecipe, Reference


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_reference_network_has_2_662_146_parameters():
    """Exactly the published network, by its number of parameters."""
    assert parameters(build(Reference(), 2)) == 2_662_146


def test_the_reference_network_applies_one_block_four_times():
    """64, 512, and 512 four times with the same weights; each convolution, ReLU, norm, pool."""
    model = ReferenceNet(2).eval()
    shapes: list[tuple[int, ...]] = []
    for block in (model.first, model.second, model.repeated):
        assert [type(layer) for layer in block] == [
            nn.Conv2d,
            nn.ReLU,
            nn.BatchNorm2d,
            nn.MaxPool2d,
        ]
        block.register_forward_hook(lambda _, __, output: shapes.append(tuple(output.shape)))
    with torch.no_grad():
        predictions = model(torch.zeros(1, 1, 128, 128))
    assert shapes == [(1, 64, 64, 64), *((1, 512, side, side) for side in (32, 16, 8, 4, 2))]
    assert predictions.shape == (1, 2)


@pytest.mark.parametrize("size", [64, 100, 128])
@pytest.mark.parametrize("gray", [False, True])
def test_our_own_network_takes_any_size(size, gray):
    """Any side from 32 pixels on, color or gray."""
    model = build(DemoRecipe(image_size=size, gray=gray), 2)
    assert isinstance(model, CatDogNet)
    assert model(torch.zeros(2, 1 if gray else 3, size, size)).shape == (2, 2)


def test_the_preparation_has_the_channels_of_the_model():
    """Gray means one channel, with one mean."""
    assert TASK.transforms(CatDog(), 0).channels == 3
    gray = TASK.transforms(Reference(), 0)
    assert (gray.channels, len(gray.mean), len(gray.deviation)) == (1, 1, 1)
