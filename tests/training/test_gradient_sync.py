"""Which steps ranks cannot take together, and what a part of one image does to norms."""

import pytest
import torch
from torch import nn

from rackrun.errors import UsageError
from rackrun.training.config import Config
from rackrun.training.gradient_sync import GradientSync
from rackrun.training.ranks import Ranks
from rackrun.training.state import TrainingState

CPU = torch.device("cpu")


def test_norms_that_exchange_are_refused_where_a_step_has_fewer_samples_than_ranks(monkeypatch):
    """torch's Join cannot serve SyncBatchNorm: the line names it, and what to type."""
    monkeypatch.setattr(Ranks, "ddp", lambda ranks, model: model)  # DDP wants GPUs for it
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    sync = GradientSync(Config(), Ranks(0, 3, 0, 3, CPU), TrainingState(model, Config()))
    sync.require_join(3)
    with pytest.raises(UsageError, match=r"2 samples for 3 ranks.*SyncBatchNorm.*--resampled"):
        sync.require_join(2)
