"""Which way a run takes through the last step of an exact epoch."""

import pytest
import torch
from torch import nn

from training.config import Config
from training.optim.optimizer import make_optimizer
from training.ranks import Ranks
from training.sync.uneven_inputs import UnevenInputs, running_statistics, why_not_join


def test_models_that_exchange_more_than_gradients_take_the_even_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SyncBatchNorm, and torch's own check of collectives, cannot be served by Join."""
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    synced = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    optimizer = make_optimizer(plain, Config())
    assert why_not_join(plain, optimizer) == ""
    assert why_not_join(synced, optimizer) == "batch norms exchange their statistics"
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert why_not_join(plain, optimizer) == "torch checks every collective"


def test_a_single_picture_uses_the_running_statistics() -> None:
    """It has no spread of its own; two have, and an empty batch changes nothing."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for pictures in (0, 1):
        with running_statistics(model, pictures):
            model(torch.rand(pictures, 3)).sum().backward()
        assert model[1].training
        for name in ("1.running_mean", "1.running_var"):
            assert torch.equal(model.state_dict()[name], before[name])
    with running_statistics(model, 2):
        model(torch.rand(2, 3))
    assert not torch.equal(model.state_dict()["1.running_mean"], before["1.running_mean"])


def test_a_rank_alone_and_full_steps_need_nothing() -> None:
    """Join comes in only where some ranks have no samples."""
    model = nn.Linear(2, 2)

    class Holder:
        optimizer = make_optimizer(model, Config())

    tail = UnevenInputs(Ranks(0, 3, 0, 3, torch.device("cpu")), model, Holder())  # type: ignore[arg-type]
    with tail.at(3):
        pass
    assert tail.computes(1) and not tail.computes(0)
    assert tail.remark(2) == ""


def test_the_even_way_is_said_once_with_its_reason() -> None:
    """One sentence at the start of a run, if its epochs end with fewer samples than ranks."""
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))

    class Holder:
        optimizer = make_optimizer(model, Config())

    tail = UnevenInputs(Ranks(0, 3, 0, 3, torch.device("cpu")), model, Holder())  # type: ignore[arg-type]
    assert tail.remark(3) == ""
    assert tail.remark(2) == (
        "the last step of an epoch has 2 samples for 3 ranks; it runs the even way, without Join:"
        " batch norms exchange their statistics"
    )
    assert tail.computes(0)
