"""Ranks that train apart and meet now and then: alike where it counts, and refused where not."""

from typing import Any

import pytest
import torch
from torch import nn

from rackrun.errors import UsageError
from tests.training.torchrun import output_of
from training.config import Config
from training.state import TrainingState
from training.sync.gradient_sync import is_local_step, learned_by


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Run two real ranks under torchrun and gloo; return their output."""
    return output_of("local_sgd_ranks.py", tmp_path_factory.mktemp("two"))


def test_ranks_are_alike_after_an_epoch(held: str) -> None:
    """Weights, momenta and the average of weights are the same on both, bit for bit."""
    assert "holds: ranks_are_alike_after_an_epoch" in held


def test_meeting_after_every_step_is_exchanging_gradients(held: str) -> None:
    """--local-sgd-steps 1 gives the weights that gradients give, with momentum and the average."""
    assert "holds: meeting_after_every_step_is_exchanging_gradients" in held


def test_in_between_ranks_go_ways_of_their_own(held: str) -> None:
    """Rarer meetings change the result a little: nothing travels in between."""
    assert "holds: in_between_ranks_go_ways_of_their_own" in held


def test_a_stop_between_two_meetings_loses_nothing(held: str) -> None:
    """A checkpoint is the average of all ranks, and both go on from it."""
    assert "holds: a_stop_between_two_meetings_loses_nothing" in held


def test_gradients_travel_for_a_tenth_of_the_run() -> None:
    """The first steps, in which weights change most, are taken together."""
    config = Config(local_sgd_steps=8)
    assert [step for step in range(100) if not is_local_step(config, 100, step)] == list(range(10))
    assert not any(is_local_step(Config(), 100, step) for step in range(100))
    assert is_local_step(Config(local_sgd_steps=1), 100, 10)


@pytest.mark.parametrize(
    ("times", "options"),
    [
        (2, {}),
        (1, {"momentum": 0.0}),
        (3, {"ema_decay": 0.9}),
        (3, {"optimizer": "adamw"}),
        (4, {"optimizer": "adamw", "ema_decay": 0.9}),
    ],
    ids=str,
)
def test_an_exchange_has_so_many_times_the_bytes_of_gradients(
    times: int, options: dict[str, Any]
) -> None:
    """Momenta and the average travel with the weights, as the page on slow networks counts them."""
    model = nn.Linear(3, 2)
    state = TrainingState(model, Config(**options))
    model(torch.ones(1, 3)).sum().backward()
    gradients = sum(weight.numel() for weight in model.parameters())
    state.advance()
    assert sum(tensor.numel() for tensor in learned_by(state)) == times * gradients


def test_what_it_breaks_is_refused() -> None:
    """Exact epochs promise the steps of one process; shortened gradients would hardly travel."""
    with pytest.raises(UsageError, match="--local-sgd-steps and --exact-epochs"):
        Config(local_sgd_steps=8, exact_epochs=True)
    with pytest.raises(UsageError, match="--local-sgd-steps and --grad-compression powersgd"):
        Config(local_sgd_steps=8, grad_compression="powersgd")
