"""What trains, at which rate, until when."""

from typing import Any

import pytest
import torch
from torch import nn

from rackrun.errors import UsageError
from rackrun.training.config import Config
from rackrun.training.counts import Counts
from rackrun.training.layers import frozen_weights, head_of
from rackrun.training.state import TrainingState


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5)),
        nn.Flatten(),
        nn.Linear(2, 2),
    )


def stepped(state: TrainingState) -> set[str]:
    """Return the names of the tensors that a step changes."""
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    state.set_lr(0.1)
    torch.manual_seed(1)
    state.model(torch.randn(8, 1, 3, 3)).square().mean().backward()
    state.advance()
    return {
        name
        for name, tensor in state.model.state_dict().items()
        if not torch.equal(tensor, before[name])
    }


def test_frozen_layers_keep_weights_and_statistics():
    """Also after an evaluation; then all train, and what was not to train never does."""
    model = net()
    model[0][0].bias.requires_grad_(False)
    state = TrainingState(model, Config(weight_decay=0.1))
    state.freeze(("body",), 2)
    assert stepped(state) == {"2.weight", "2.bias"}
    state.model.eval()
    state.train()
    assert not state.model[0][2].training and state.model[2].training
    assert stepped(state) == {"2.weight", "2.bias"}
    state.freeze(("0.0",), 2)
    assert stepped(state) == {name for name in model.state_dict() if not name.startswith("0.0")}
    state.freeze((), 2)
    assert stepped(state) == state.model.state_dict().keys() - {"0.0.bias"}


def test_a_name_that_no_layer_has_is_refused():
    """With near ones; and so is freezing everything."""
    assert frozen_weights(net(), ("0.1", "2"), 2) == {
        "0.1.weight",
        "0.1.bias",
        "2.weight",
        "2.bias",
    }
    with pytest.raises(UsageError, match=r"--freeze bdy: no layer of the model; did you mean body"):
        frozen_weights(net(), ("bdy",), 2)
    with pytest.raises(UsageError, match="leaves nothing to train"):
        frozen_weights(net(), ("body", "2"), 2)


def test_the_last_layer_is_the_one_with_an_output_for_each_class():
    """Also where it is defined first; a model without any cannot train its last layer alone."""
    model = nn.ModuleDict({"head": nn.Linear(8, 3), "body": nn.Conv2d(3, 8, 3)})
    assert head_of(model, 3) == "head"
    assert frozen_weights(model, ("body",), 3) == {"body.weight", "body.bias"}
    with pytest.raises(UsageError, match="no Linear or Conv2d with 5 outputs, one for each class"):
        frozen_weights(model, ("body",), 5)


def outcomes(
    state: TrainingState, *evaluations: tuple[int, float]
) -> list[tuple[bool, bool, float]]:
    """Return for each (accuracy, loss): whether it is the best, whether to stop, the lr factor."""
    return [
        (
            state.finish_epoch(Counts(loss=loss * 10, top1=right, samples=10)),
            state.exhausted,
            round(state.improvement.lr_factor, 6),
        )
        for right, loss in evaluations
    ]


PATIENT: dict[str, Any] = {
    "lr_schedule": "plateau", "patience": 3, "plateau_epochs": 2, "head_epochs": 1,
}  # fmt: skip


def test_evaluations_decide_when_the_rate_falls_and_when_the_run_ends():
    """A lower loss at equal accuracy counts; nothing is counted while only the head trains."""
    state = TrainingState(net(), Config(**PATIENT))
    assert outcomes(state, (6, 1.0), (5, 1.0), (6, 0.9), (6, 0.9)) == [
        (True, False, 1), (False, False, 1), (True, False, 1), (True, False, 1),
    ]  # fmt: skip
    assert outcomes(state, (5, 0.1), (5, 0.1)) == [(False, False, 0.1), (False, True, 0.1)]
    assert state.set_lr(0.2) == pytest.approx(0.02)
