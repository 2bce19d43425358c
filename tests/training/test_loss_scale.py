"""The loss scale: overflowing steps are skipped, counted and reported; nothing else changes."""

import torch
from torch import nn

from rackrun.training.checkpoint import pack, unpack
from rackrun.training.config import Config
from rackrun.training.state import TrainingState


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
