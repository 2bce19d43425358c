"""What trains, at which rate, until when."""

from typing import Any

import pytest
import torch
from torch import nn

from rackrun.errors import UsageError
from training.config import Config
from training.counts import Counts
from training.models.dropout import with_dropout
from training.optim.freezing import frozen_weights
from training.schedule import make_schedule
from training.state import TrainingState, pack, unpack


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5)),
        nn.Flatten(),
        nn.Linear(2, 2),
    )


def stepped(state: TrainingState) -> set[str]:
    """The tensors that a step changes."""
    before = {name: one.clone() for name, one in state.model.state_dict().items()}
    state.set_lr(0.1)
    torch.manual_seed(1)
    state.model(torch.randn(8, 1, 3, 3)).square().mean().backward()
    state.advance()
    return {
        name for name, one in state.model.state_dict().items() if not torch.equal(one, before[name])
    }


def test_frozen_layers_keep_weights_and_statistics() -> None:
    """Also after an evaluation; then all train, and what was not to train never does."""
    model = net()
    model[0][0].bias.requires_grad_(False)  # type: ignore[index]
    state = TrainingState(model, Config(weight_decay=0.1))
    state.freeze(("body",))
    assert stepped(state) == {"2.weight", "2.bias"}
    state.model.eval()
    state.train()
    assert not state.model[0][2].training and state.model[2].training  # type: ignore[index]
    assert stepped(state) == {"2.weight", "2.bias"}
    state.freeze(("0.0",))
    assert stepped(state) == {name for name in model.state_dict() if not name.startswith("0.0")}
    state.freeze(())
    assert stepped(state) == state.model.state_dict().keys() - {"0.0.bias"}


def test_a_name_that_no_layer_has_is_refused() -> None:
    """With near ones; and so is freezing everything."""
    assert frozen_weights(net(), ("0.1", "2")) == {"0.1.weight", "0.1.bias", "2.weight", "2.bias"}
    with pytest.raises(UsageError, match=r"--freeze bdy: no layer of the model; did you mean body"):
        frozen_weights(net(), ("bdy",))
    with pytest.raises(UsageError, match="leaves nothing to train"):
        frozen_weights(net(), ("body", "2"))


def test_each_stage_has_a_course_of_its_own() -> None:
    """Head first at its rate, then all layers at theirs, each with its warm-up."""
    config = Config(
        epochs=6, head_epochs=2, head_lr=1.0, lr=0.1, warmup_epochs=1, lr_schedule="linear",
        freeze="stem",
    )  # fmt: skip
    schedule = make_schedule(config, 2, 1)
    rates = [0.5, 1, 1, 0.5] + [0.05, 0.1] + [0.1 * left / 6 for left in range(6, 0, -1)]
    assert [schedule.lr(step) for step in range(12)] == pytest.approx(rates)
    assert [stage.frozen for stage in schedule.stages] == [("body", "stem"), ("stem",)]
    assert [stage.peak for stage in schedule.stages_from(2)] == [0.1]
    assert schedule.stages_from(6) == schedule.stages[1:]
    short = make_schedule(Config(epochs=1, head_epochs=2), 2, 1)
    assert [stage.frozen for stage in short.stages] == [("body",)]


def judged(state: TrainingState, *evaluations: tuple[int, float]) -> list[tuple[bool, bool, float]]:
    """For each (right answers, loss): is it the best, does the run end, the rate's factor."""
    return [
        (
            state.finish_epoch(Counts(loss=loss * 10, top1=right, samples=10)),
            state.exhausted,
            round(state.improvement.lr_factor, 6),
        )
        for right, loss in evaluations
    ]


PATIENT: dict[str, Any] = {
    "lr_schedule": "plateau", "patience": 3, "plateau_epochs": 2, "plateau_factor": 0.5,
    "head_epochs": 1,
}  # fmt: skip


def test_evaluations_decide_when_the_rate_falls_and_when_the_run_ends() -> None:
    """A lower loss at equal accuracy counts; nothing is counted while only the head trains."""
    state = TrainingState(net(), Config(**PATIENT))
    assert judged(state, (6, 1.0), (5, 1.0), (6, 0.9), (6, 0.9)) == [
        (True, False, 1), (False, False, 1), (True, False, 1), (True, False, 1),
    ]  # fmt: skip
    assert judged(state, (5, 0.1), (5, 0.1)) == [(False, False, 0.5), (False, True, 0.5)]
    assert state.set_lr(0.2) == pytest.approx(0.1)


def test_what_evaluations_came_to_survives_a_restart() -> None:
    """In the midst of waiting; a checkpoint of an earlier version knows the best accuracy only."""
    state = TrainingState(net(), Config(**PATIENT))
    judged(state, (6, 1.0), (5, 1.0), (5, 1.0))
    other = TrainingState(net(), Config(**PATIENT))
    other.load_state_dict(unpack(pack(state.state_dict())))
    assert other.improvement == state.improvement
    assert judged(other, (5, 1.0), (5, 1.0)) == judged(state, (5, 1.0), (5, 1.0))
    assert other.exhausted
    earlier = state.state_dict()
    del earlier["improvement"]
    other.load_state_dict(earlier)
    assert (other.best, other.improvement.stale, other.improvement.lr_factor) == (0.6, 0, 1.0)


@pytest.mark.parametrize("own", [True, False], ids=["the model's own", "none of its own"])
def test_dropout_comes_before_the_last_layer(own: bool) -> None:
    """In training mode only; names of weights stay."""
    layers = [nn.Flatten(), nn.Dropout(0.1)][: 1 + own]
    model = nn.Sequential(*layers, nn.Linear(1000, 1000, bias=False))
    names = list(model.state_dict())
    assert list(with_dropout(model, 0.75).state_dict()) == names
    nn.init.eye_(model[-1].weight)  # type: ignore[arg-type]
    torch.manual_seed(0)
    assert int((model(torch.ones(1, 1000)) == 4).sum()) == pytest.approx(250, abs=50)
    assert torch.equal(model.eval()(torch.ones(1, 1000)), torch.ones(1, 1000))
