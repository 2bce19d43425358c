"""What survives a restart, and how a step changes it."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rackrun.errors import SaveError
from rackrun.training.checkpoint import pack, unpack
from rackrun.training.config import Config
from rackrun.training.optimizer import make_optimizer
from rackrun.training.state import TrainingState


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2))


def stepped(state: TrainingState, steps: int) -> TrainingState:
    for step in range(steps):
        torch.manual_seed(state.step + step)
        state.model(torch.randn(4, 1, 3, 3)).square().mean().backward()
        state.advance()
    return state


class OnGpu(nn.Linear):
    """A layer whose weights claim to be on a GPU."""

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return iter([SimpleNamespace(device=torch.device("cuda"))])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_on_a_gpu_one_kernel_updates_all_weights(optimizer):
    """Optimizers are fused there, and left to torch on a CPU."""
    for model, fused in ((OnGpu(2, 2), True), (nn.Linear(2, 2), None)):
        groups = make_optimizer(model, Config(optimizer=optimizer)).param_groups
        assert [group["fused"] for group in groups] == [fused, fused]


class Tokens(nn.Module):
    """What has no weight decay although it has several dimensions, under torchvision's names."""

    def __init__(self) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, 2))
        self.embed = nn.Linear(2, 2)  # a layer, whose weight decays
        self.pos_embedding = nn.Parameter(torch.zeros(1, 4, 2))
        self.relative_position_bias_table = nn.Parameter(torch.zeros(9, 2))
        self.layer_scale = nn.Parameter(torch.zeros(2, 1, 1))
        self.special = nn.Parameter(torch.zeros(2, 2))
        self.inner = nn.Linear(2, 2)
        self.outer = nn.Sequential(nn.Linear(2, 2))

    def no_weight_decay(self) -> list[str]:
        return ["special", "inner.weight", "outer"]


def test_weight_decay_leaves_tokens_embeddings_tables_and_scales_alone():
    """And whatever the model names itself, as timm's models do."""
    model = Tokens()
    decayed, spared = make_optimizer(model, Config(weight_decay=0.1)).param_groups
    assert decayed["params"] == [model.embed.weight]
    assert len(spared["params"]) == 10 and spared["weight_decay"] == 0


def test_layers_nearer_to_the_image_learn_more_slowly():
    """--layer-decay counts blocks; a norm counts with the layer before it."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.Linear(4, 4)))
    model.append(nn.Linear(4, 2))
    state = TrainingState(model, Config(layer_decay=0.5))
    state.set_lr(0.8)
    rates = {
        weight: group["lr"] for group in state.optimizer.param_groups for weight in group["params"]
    }
    assert [rates[weight] for weight in model.parameters()] == [0.2] * 4 + [0.4] * 2 + [0.8] * 2


def test_a_checkpoint_with_other_groups_is_refused():
    """Another --layer-decay has other groups; the message names the option."""
    with pytest.raises(SaveError, match="type the run's --layer-decay"):
        TrainingState(net(), Config(layer_decay=0.5)).load_state_dict(
            TrainingState(net(), Config()).state_dict()
        )


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_checkpoint_of_a_fused_optimizer_is_taken_up_without_one(optimizer):
    """One made on a GPU goes on here with its momenta and counts, in the loops of this device."""
    config = Config(optimizer=optimizer)
    fused, state = TrainingState(net(), config), TrainingState(net(), config)
    for group in fused.optimizer.param_groups:
        group["fused"] = True
    stepped(fused, 2)
    state.load_state_dict(fused.state_dict())
    assert [group["fused"] for group in state.optimizer.param_groups] == [None, None]
    for weight, other in zip(fused.model.parameters(), state.model.parameters(), strict=True):
        local, remote = state.optimizer.state[other], fused.optimizer.state[weight]
        assert all(torch.equal(local[name], remote[name]) for name in remote)
    stepped(state, 1)


def test_the_rate_of_a_group_is_the_schedules_less_what_plateaus_took():
    """Groups that a user's optimizer has made have no share of their own."""
    state = TrainingState(net(), Config(layer_decay=0.5))
    state.improvement.lr_factor = 0.1
    del state.optimizer.param_groups[0]["lr_scale"]
    assert state.set_lr(2.0) == pytest.approx(0.2)
    rates = [(group["lr"], group.get("lr_scale", 1.0)) for group in state.optimizer.param_groups]
    assert [rate for rate, _ in rates] == pytest.approx([0.2 * share for _, share in rates])
    assert {share for _, share in rates} == {0.5, 1.0}


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
