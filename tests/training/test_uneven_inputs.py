"""Which way a run takes through the last step of an exact epoch."""

import pytest
import torch
from torch import nn

from rackrun.errors import UsageError
from rackrun.training.config import Config
from rackrun.training.optimizer import make_optimizer
from rackrun.training.ranks import Ranks
from rackrun.training.state import TrainingState
from rackrun.training.sync.gradient_sync import GradientSync
from rackrun.training.sync.uneven_inputs import UnevenInputs, norms_of_one_image, why_not_join

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"))
TWO = Ranks(0, 2, 0, 2, torch.device("cpu"))


def test_models_that_exchange_more_than_gradients_take_the_even_way(monkeypatch):
    """SyncBatchNorm, and torch's own check of collectives, cannot be served by Join."""
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    synced = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    optimizer = make_optimizer(plain, Config())
    assert why_not_join(plain, optimizer) == ""
    assert why_not_join(synced, optimizer) == "batch norms exchange their statistics"
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert why_not_join(plain, optimizer) == "torch checks every collective"


def test_gradients_that_travel_in_another_form_take_the_even_way(monkeypatch):
    """Join mirrors the exchange of plain ones alone."""
    monkeypatch.setattr(Ranks, "ddp", lambda ranks, model: model)
    for gradients in ("float32", "bfloat16"):
        config = Config(grad_compression=gradients)
        sync = GradientSync(config, TWO, TrainingState(nn.Linear(2, 2), config))
        assert ("another form" in sync.remark(1)) == (gradients == "bfloat16")


def statistics(norm: nn.Module) -> torch.Tensor:
    return torch.cat([norm.get_buffer(name).clone() for name in ("running_mean", "running_var")])


def test_a_norm_with_one_value_per_channel_uses_its_running_statistics():
    """The norm of a convolution trains on a single image all the same; no images change nothing."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        *(nn.Linear(2, 4), nn.BatchNorm1d(4)),
    )
    wide, narrow = model[1], model[5]
    with pytest.raises(UsageError, match="the batch norm 5 has one value per channel"):  # noqa: SIM117
        with norms_of_one_image(model, compiled=False):
            model(torch.rand(1, 3, 8, 8))
    for images, changed in ((0, []), (2, [wide, narrow]), (1, [wide])):
        before = {norm: statistics(norm) for norm in (wide, narrow)}
        sync = GradientSync(Config(), ALONE, TrainingState(model.train(), Config()))
        with sync.part(images, is_last=True):
            model(torch.rand(images, 3, 8, 8)).sum().backward()
        assert wide.training and narrow.training
        assert [
            norm for norm, before_step in before.items() if (statistics(norm) != before_step).any()
        ] == changed


def test_statistics_are_shared_before_a_rank_has_a_single_image(monkeypatch):
    """Or none. Norms that exchange theirs need nothing, and neither does a model without any."""
    shared: list[nn.Module] = []
    monkeypatch.setattr(Ranks, "ddp", lambda ranks, model: model)
    monkeypatch.setattr(Ranks, "share_statistics", lambda ranks, model: shared.append(model))
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for other in (nn.Linear(2, 2), nn.Sequential(nn.SyncBatchNorm(2)), model):
        for fewest in (0, 1, 2):
            sync = GradientSync(Config(), TWO, TrainingState(other, Config()))
            with sync.step(samples=2, fewest=fewest):
                pass
    assert shared == [model] * 2


def test_a_rank_alone_and_full_steps_need_nothing():
    """Join comes in only where some ranks have no samples."""
    model = nn.Linear(2, 2)

    class Holder:
        optimizer = make_optimizer(model, Config())

    tail = UnevenInputs(Ranks(0, 3, 0, 3, torch.device("cpu")), model, Holder())
    with tail.at(3):
        pass
    assert tail.computes(1) and not tail.computes(0)
    assert tail.remark(2) == ""


def test_the_even_way_is_said_once_with_its_reason():
    """One sentence at the start of a run, if its epochs end with fewer samples than ranks."""
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))

    class Holder:
        optimizer = make_optimizer(model, Config())

    tail = UnevenInputs(Ranks(0, 3, 0, 3, torch.device("cpu")), model, Holder())
    assert tail.remark(3) == ""
    assert tail.remark(2) == (
        "the last step of an epoch has 2 samples for 3 ranks; it runs the even way, without Join:"
        " batch norms exchange their statistics"
    )
    assert tail.computes(0)
