"""LARS and LAMB move each layer in proportion to its weights, and learn."""

import copy

import pytest
import torch
from torch import nn

from training.optim.lars_lamb import Lamb, Lars, ratios


def groups(model: nn.Module, decay: float) -> list[dict[str, object]]:
    """Weights with decay, biases without, as the loop makes them."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def test_lars_takes_the_published_step() -> None:
    """One layer by hand: gradient plus decay, scaled to the weights, then momentum."""
    weight = torch.tensor([[3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    lars = Lars([{"params": [weight], "weight_decay": 0.1}], lr=2.0, momentum=0.5, trust=0.01)
    expected, momentum = weight.detach().clone(), torch.zeros(1, 2, dtype=torch.float64)
    for gradient in (torch.tensor([[1.0, 2.0]]).double(), torch.tensor([[-2.0, 0.5]]).double()):
        weight.grad = gradient
        lars.step()
        decayed = gradient + 0.1 * expected
        local = 0.01 * expected.norm() / decayed.norm()
        momentum = 0.5 * momentum + 2.0 * local * decayed
        expected = expected - momentum
        assert torch.allclose(weight.detach(), expected)


def test_lamb_takes_the_published_step() -> None:
    """One layer by hand: Adam's update plus decay, as long as the weights."""
    weight = torch.tensor([[3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    lamb = Lamb([{"params": [weight], "weight_decay": 0.1}], lr=0.5, epsilon=1e-6)
    expected = weight.detach().clone()
    mean = square = torch.zeros(1, 2, dtype=torch.float64)
    for step, gradient in enumerate(([[1.0, 2.0]], [[-2.0, 0.5]]), start=1):
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        lamb.step()
        mean = 0.9 * mean + 0.1 * weight.grad
        square = 0.999 * square + 0.001 * weight.grad**2
        update = mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-6)
        update = update + 0.1 * expected
        expected = expected - 0.5 * expected.norm() / update.norm() * update
        assert torch.allclose(weight.detach(), expected)


def test_a_layer_without_weights_or_gradient_takes_a_plain_step() -> None:
    """Zeros lead to a ratio of one, never to a division by nothing."""
    zeros, ones = torch.zeros(3), torch.ones(3)
    assert [float(ratio) for ratio in ratios([zeros, ones, ones], [ones, zeros, ones], 0.5)] == [
        1.0,
        1.0,
        0.5,
    ]


@pytest.mark.parametrize("rule", [Lars, Lamb])
def test_a_model_learns_and_goes_on_from_a_saved_state(rule: type[Lars] | type[Lamb]) -> None:
    """The loss falls; a state that was saved and loaded goes on with the same weights."""
    torch.manual_seed(0)
    inputs, wanted = torch.randn(64, 8), torch.randint(3, (64,))

    def build() -> tuple[nn.Module, Lars | Lamb]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        rate = 10.0 if rule is Lars else 0.02
        return model, rule(groups(model, 1e-4), lr=rate)

    def train(model: nn.Module, optimizer: Lars | Lamb, steps: int) -> float:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), wanted)
            torch.autograd.backward(loss)
            optimizer.step()
        return float(loss.detach())

    model, optimizer = build()
    first = train(model, optimizer, 1)
    train(model, optimizer, 30)
    other, restored = build()
    other.load_state_dict(model.state_dict())
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(model, optimizer, 30) == train(other, restored, 30) < 0.7 * first
