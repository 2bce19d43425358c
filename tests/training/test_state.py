"""What survives a restart, and how a step changes it."""

import pytest
import torch
from torch import nn

from training.config import Config
from training.counts import Counts
from training.optim.optimizer import make_optimizer
from training.run import checkpoint
from training.state import TrainingState


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2))


def stepped(state: TrainingState, steps: int) -> TrainingState:
    for step in range(steps):
        torch.manual_seed(state.step + step)
        state.model(torch.randn(4, 1, 3, 3)).square().mean().backward()
        state.advance()
    return state


def test_weight_decay_leaves_norms_and_biases_alone() -> None:
    """Only matrices and kernels decay."""
    decayed, spared = make_optimizer(net(), Config(weight_decay=0.1)).param_groups
    assert decayed["weight_decay"] == 0.1
    assert spared["weight_decay"] == 0
    assert {parameter.ndim for parameter in decayed["params"]} == {2, 4}
    assert {parameter.ndim for parameter in spared["params"]} == {1}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_state_goes_on_as_if_nothing_had_happened(optimizer: str) -> None:
    """Weights, momentum, average, counters: after a round trip the next steps are the same bits."""
    config = Config(optimizer=optimizer, lr=0.01, ema_decay=0.9)  # type: ignore[arg-type]
    one = stepped(TrainingState(net(), config), 3)
    other = TrainingState(net(), config)
    other.load_state_dict(checkpoint.unpack(checkpoint.pack(one.state_dict())))
    assert other.step == 3
    stepped(one, 2)
    stepped(other, 2)
    for name, tensor in one.evaluated.state_dict().items():
        assert torch.equal(tensor, other.evaluated.state_dict()[name])


def test_the_average_follows_slowly_and_is_what_is_judged() -> None:
    """Between where it was and where the model is; buffers are the model's own."""
    state = TrainingState(net(), Config(lr=0.01, ema_decay=0.99))
    assert state.average is not None
    start = state.average.model[3].weight.clone()  # type: ignore[index]
    stepped(state, 30)
    moved = (state.model[3].weight - start).abs().sum()  # type: ignore[index]
    followed = (state.evaluated[3].weight - start).abs().sum()  # type: ignore[index]
    assert 0 < followed < moved
    assert torch.equal(state.evaluated[1].running_mean, state.model[1].running_mean)  # type: ignore[index]
    assert TrainingState(net(), Config()).evaluated is not None
    assert TrainingState(net(), Config()).average is None


def test_the_best_epoch_is_known() -> None:
    """An epoch is the best when its evaluation is at least as good as all before."""
    state = TrainingState(net(), Config())
    found = [
        state.finish_epoch(Counts(top1=right, samples=10) if right is not None else None)
        for right in (5, 4, None, 5, 6)
    ]
    assert found == [True, False, False, True, True]
    assert (state.epoch, state.accuracy, state.best) == (5, 0.6, 0.6)
