"""Gradient checkpointing: the same step, with less kept for backward."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from rackrun.errors import UsageError
from rackrun.training.models.named import named_model
from rackrun.training.models.recomputed import with_recomputed_blocks


def stepped(model: nn.Module, images: torch.Tensor) -> tuple[float, int]:
    """Return the loss of a step, and the bytes that are kept for backward at its height."""
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    torch.manual_seed(5)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.train()(images).square().sum()
    loss.backward()
    return float(loss.detach()), kept


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_a_step_is_the_same_and_keeps_less(name):
    """Loss, gradients, dropout and the statistics of norms to the bit, also in a copy (EMA)."""
    torch.manual_seed(3)
    plain = named_model(name, 4, 32)
    result = with_recomputed_blocks(copy.deepcopy(plain))
    result = copy.deepcopy(result)
    images = torch.rand(3, 3, 64, 64)
    (loss, whole), (same_loss, less) = stepped(plain, images), stepped(result, images)
    assert same_loss == loss
    assert less < 0.6 * whole
    for weight, other in zip(plain.parameters(), result.parameters(), strict=True):
        assert weight.grad is not None and other.grad is not None
        assert torch.equal(weight.grad, other.grad)
    for buffer, other in zip(plain.buffers(), result.buffers(), strict=True):
        assert torch.equal(buffer, other)
    assert list(plain.state_dict()) == list(result.state_dict())


class Keyed(nn.Module):
    """Blocks that are called with keywords, as those of timm's BEiT and EVA are."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())

        def forward(self, images: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layers(images) * scale
            return result

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            images = block(images, scale=self.scale)
        return images


def test_blocks_may_take_keywords():
    """What comes by name has a gradient, too; and so without any gradient."""
    torch.manual_seed(3)
    plain = Keyed()
    result = with_recomputed_blocks(copy.deepcopy(plain))
    (loss, whole), (same_loss, less) = (
        stepped(model, torch.ones(99, 8)) for model in (plain, result)
    )
    assert (same_loss, result.scale.grad) == (loss, plain.scale.grad)
    assert less < 0.6 * whole
    with torch.no_grad():
        assert torch.equal(result(torch.ones(2, 8)), plain(torch.ones(2, 8)))


def test_a_model_without_blocks_is_refused():
    """There is nothing to compute again."""
    with pytest.raises(UsageError, match="no blocks of several layers"):
        with_recomputed_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
