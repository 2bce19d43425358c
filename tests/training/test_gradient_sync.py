"""Which steps ranks cannot take together, and what a part of one image does to norms."""

import pytest
import torch
from torch import nn

from rackrun.errors import UsageError
from rackrun.training.config import Config
from rackrun.training.ranks import Ranks
from rackrun.training.state import TrainingState
from rackrun.training.sync.gradient_sync import GradientSync

CPU = torch.device("cpu")


def test_norms_that_exchange_are_refused_where_a_step_has_fewer_samples_than_ranks(monkeypatch):
    """torch's Join cannot serve SyncBatchNorm: the line names it, and what to type."""
    monkeypatch.setattr(Ranks, "ddp", lambda ranks, model: model)  # DDP wants GPUs for it
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    sync = GradientSync(Config(), Ranks(0, 3, 0, 3, CPU), TrainingState(model, Config()))
    sync.require_join(3)
    with pytest.raises(UsageError, match=r"2 samples for 3 ranks.*SyncBatchNorm.*--resampled"):
        sync.require_join(2)


def test_norms_use_their_running_statistics_for_a_part_of_one_image():
    """Frozen ones do anyway, and stay so; no images change nothing."""
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.BatchNorm2d(2))
    state = TrainingState(model, Config())
    sync = GradientSync(Config(), Ranks(0, 1, 0, 1, CPU), state)
    model[2].eval()
    for images, changes in ((0, False), (1, False), (2, True)):
        before = model[1].running_mean.clone()
        with sync.part(images, is_last=True):
            model(torch.rand(images, 3, 8, 8)).sum().backward()
        assert torch.equal(before, model[1].running_mean) != changes
        assert model[1].training and not model[2].training
