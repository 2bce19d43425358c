"""The loss scale: overflowing steps are skipped, counted and reported; nothing else changes."""

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

from rackrun.training.checkpoint import pack, unpack
from rackrun.training.config import Config
from rackrun.training.counts import Scaling
from rackrun.training.state import TrainingState


def stepped(state: TrainingState, factors: list[float], clip: float) -> list[float]:
    """Return the weights, 1 at first, after steps whose loss is each factor times their sum."""
    for factor in factors:
        torch.autograd.backward(state.scaler.scale(state.model.weight.sum() * factor))
        if clip:
            state.scaler.unscale_(state.optimizer)
            clip_grad_norm_(state.model.parameters(), clip)
        state.set_lr(0.5)
        state.advance()
    return state.model.weight.flatten().tolist()


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("clip", [0.0, 0.25])
def test_overflows_are_skipped_and_all_else_is_as_without_a_scale(clip, fused):
    """Neither weights nor momenta move, by loops over weights or in one kernel; a clipped norm is
    that of the gradients without their scale."""
    scaled, plain = (
        TrainingState(nn.Linear(2, 1, bias=False), Config(), float16=float16)
        for float16 in (True, False)
    )
    for state in (scaled, plain):
        nn.init.ones_(state.model.weight)
        state.optimizer = SGD(state.model.parameters(), lr=0.5, momentum=0.5, fused=fused)
    result = stepped(scaled, [1, float("inf"), 2, float("nan"), 3], clip)
    assert result == stepped(plain, [1, 2, 3], clip)
    assert scaled.take_scaling() == Scaling(2**14, 2)
    assert scaled.take_scaling() == Scaling(2**14, 0)
    assert plain.take_scaling() is None and plain.state_dict()["loss_scale"] == {}


def test_a_checkpoint_holds_the_scale_and_fits_runs_without_one():
    """Also one in bfloat16 goes on from it, and one in float16 from a run that had no scale."""
    half, other, whole = (
        TrainingState(nn.Linear(2, 2), Config(), float16=float16) for float16 in (True, True, False)
    )
    torch.autograd.backward(half.scaler.scale(half.model(torch.ones(2)).sum() * float("inf")))
    half.advance()
    other.load_state_dict(unpack(pack(half.state_dict())))
    assert other.scaler.state_dict() == half.scaler.state_dict()
    assert other.scaler.state_dict()["scale"] == 2**15
    whole.load_state_dict(half.state_dict())
    half.load_state_dict(whole.state_dict())
    assert half.scaler.state_dict()["scale"] == 2**15
