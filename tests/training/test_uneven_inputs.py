"""Which steps ranks cannot take together, and what a part of one image does to norms."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from rackrun.errors import UsageError
from rackrun.training.config import Config
from rackrun.training.state import TrainingState
from rackrun.training.uneven_inputs import norms_of_one_image, require_join, taken_by_all
from rackrun.training.world import joined
from tests.lab.ranks import on_ranks


def test_norms_that_exchange_are_refused_where_a_step_has_fewer_samples_than_ranks():
    """torch's Join cannot serve SyncBatchNorm: the line names it, and what to type."""
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    require_join(model, 3, world=3)
    with pytest.raises(UsageError, match=r"2 samples for 3 ranks.*SyncBatchNorm.*--resampled"):
        require_join(model, 2, world=3)


def test_a_norm_of_one_value_per_channel_uses_its_running_statistics():
    """The norm of a convolution has pixels to train on; frozen ones stay so."""
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(2))
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.BatchNorm2d(2), pooled)
    norms = [model[1], model[2].eval(), pooled[1]]
    with (
        pytest.raises(UsageError, match="one value per channel"),
        norms_of_one_image(model, is_compiled=False),
    ):
        model(torch.rand(1, 3, 8, 8))
    for images, changed in ((0, []), (2, [0, 2]), (1, [0])):
        before = [norm.running_mean.clone() for norm in norms]
        is_one = images == 1
        with norms_of_one_image(model, is_compiled=False) if is_one else nullcontext():
            model(torch.rand(images, 3, 8, 8)).sum().backward()
        assert changed == [n for n in range(3) if not torch.equal(before[n], norms[n].running_mean)]
        assert [norm.training for norm in norms] == [True, False, True]


@on_ranks(2)
def test_ranks_share_statistics_before_a_step_with_a_part_of_one_image():
    """A norm that cannot compute its own uses them, and those of each rank are of its images."""
    with joined(Config(device="cpu")) as ranks:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model[1].running_mean.fill_(ranks.rank)
        state = TrainingState(model, Config())
        ddp = ranks.ddp(model)
        assert ddp
        assert model[1].running_mean.tolist() == [ranks.rank] * 2
        with taken_by_all(ddp, state, ranks, samples=4, fewest=2):
            assert model[1].running_mean.tolist() == [ranks.rank] * 2
        with taken_by_all(ddp, state, ranks, samples=3, fewest=1):
            assert model[1].running_mean.tolist() == [0.5, 0.5]
