"""The loss scale: overflowing steps are skipped, counted and reported; nothing else changes."""

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

from rackrun.training.checkpoint import pack, unpack
from rackrun.training.config import Config
from rackrun.training.counts import Scaling
from rackrun.training.optimizer import LossScale
from rackrun.training.state import TrainingState

CPU = torch.device("cpu")


def stepped(scale: LossScale, factors: list[float], clip: float, fused: bool | None) -> list[float]:
    """Return the weights, 1 at first, after steps whose loss is each factor times their sum."""
    weights = nn.Parameter(torch.ones(2))
    optimizer = SGD([weights], lr=0.5, momentum=0.5, fused=fused)
    for factor in factors:
        scale.backward(weights.sum() * factor)
        if clip:
            scale.unscale(optimizer)
            clip_grad_norm_([weights], clip)
        scale.step(optimizer)
        optimizer.zero_grad()
    return weights.tolist()


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("clip", [0.0, 0.25])
def test_overflows_are_skipped_and_all_else_is_as_without_a_scale(clip, fused):
    """Neither weights nor momenta move, by loops over weights or in one kernel; a clipped norm is
    that of the gradients without their scale."""
    scale, plain = LossScale(CPU, True), LossScale(CPU, False)
    result = stepped(scale, [1, float("inf"), 2, float("nan"), 3], clip, fused)
    assert result == stepped(plain, [1, 2, 3], clip, fused)
    assert scale.take() == Scaling(2**14, 2) and scale.take() == Scaling(2**14, 0)
    assert plain.take() is None and plain.state_dict() == {}


def test_a_checkpoint_holds_the_scale_and_fits_runs_without_one():
    """Also one in bfloat16 goes on from it, and one in float16 from a run that had no scale."""
    half, other, whole = (
        TrainingState(nn.Linear(2, 2), Config(), float16=float16) for float16 in (True, True, False)
    )
    half.loss_scale.backward(half.model(torch.ones(2)).sum() * float("inf"))
    half.advance()
    other.load_state_dict(unpack(pack(half.state_dict())))
    assert other.loss_scale.state_dict() == half.loss_scale.state_dict()
    assert other.loss_scale.state_dict()["scale"] == 2**15
    whole.load_state_dict(half.state_dict())
    half.load_state_dict(whole.state_dict())
    assert half.loss_scale.state_dict()["scale"] == 2**15
