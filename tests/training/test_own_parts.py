"""An optimizer and a learning rate schedule of one's own, by import path."""

import copy

import torch
from torch import nn

from rackrun.catdog.recipes import CatDog
from rackrun.training.checkpoint import pack, unpack
from rackrun.training.config import Config
from rackrun.training.optimizer import make_optimizer
from rackrun.training.state import TrainingState
from tests.lab.run import run
from tests.training.conftest import same_weights


def test_an_own_optimizer_gets_the_groups_of_weights():
    """With the weight decay of each: the example's Lion takes steps of one length, less decay."""
    model = nn.Linear(3, 2)
    before = [weight.detach().clone() for weight in model.parameters()]
    config = Config(optimizer="examples.own_parts:Lion", lr=0.1, weight_decay=0.5)
    optimizer = make_optimizer(model, config)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    for weight, old, decay in zip(model.parameters(), before, (0.5, 0.0), strict=True):
        assert torch.allclose(weight, old * (1 - 0.1 * decay) - 0.1)


def test_lamb_goes_on_bit_for_bit_from_a_checkpoint():
    """timm's counts the steps of each group of weights, not of each weight."""
    config = CatDog(optimizer="lamb", lr=0.01, weight_decay=0.02, layer_decay=0.7)
    states = []
    for saves in (False, True):
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))
        state = TrainingState(nn.Sequential(*layers), config)
        for step in range(6):
            if saves and step == 3:
                kept = unpack(pack(state.state_dict()))
                state = TrainingState(copy.deepcopy(state.model), config)
                state.load_state_dict(kept)
            torch.manual_seed(step)
            state.model(torch.rand(4, 3, 8, 8)).square().sum().backward()
            state.advance()
        states.append(state.model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_example_trains_and_resumes_bit_for_bit(tmp_path):
    """Model, optimizer and schedule from the example: its state is in the checkpoint."""
    own = "--model examples.own_parts:Net --optimizer examples.own_parts:Lion"
    own += " --lr-schedule examples.own_parts:triangle"
    options = "--weights= --synthetic --epochs 2 --steps-per-epoch 2 --batch-size 2 --lr 0.01"
    rest = "--image-size 32 --head-epochs 0 --patience 0 --device cpu --no-tensorboard"
    line = f"python -m rackrun.training classify {own} {options} {rest} --run-folder"
    for more in ("whole", "resumed --resume whole/checkpoints/step-00000002.pt"):
        ended = run(f"{line} {more}", tmp_path)
        assert ended.code == 0, ended
    assert same_weights(tmp_path / "whole", tmp_path / "resumed")
