"""Gradients in fewer bytes still train the model, and the ranks stay alike."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rackrun.training.config import Config
from rackrun.training.sync.gradient_sync import register_comm_hook
from tests.lab.ranks import on_ranks

STEPS = 60


def batches(rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of the same problem, other ones on each rank."""
    torch.manual_seed(100)
    truth = torch.randn(64, 5)
    torch.manual_seed(rank)
    while True:
        inputs = torch.randn(32, 64)
        yield inputs, (inputs @ truth).argmax(1)


def trained(gradients: str, rank: int) -> tuple[float, torch.Tensor]:
    """Train; return the mean loss of the last steps, and all weights."""
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 5))
    model = DistributedDataParallel(net)
    register_comm_hook(model, Config(grad_compression=gradients))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for (inputs, expected), _ in zip(batches(rank), range(STEPS), strict=False):
        loss = nn.functional.cross_entropy(model(inputs), expected)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    return sum(losses[-10:]) / 10, weights


@on_ranks(2)
def test_bfloat16_gradients_train_nearly_the_same_weights():
    """The sums lose digits, not the way; both ranks have the same weights, bit for bit."""
    dist.init_process_group("gloo")
    results = {name: trained(name, dist.get_rank()) for name in ("float32", "bfloat16")}
    for _, weights in results.values():
        observed = [torch.empty_like(weights) for _ in range(2)]
        dist.all_gather(observed, weights)
        assert torch.equal(*observed)
    (loss, exact), (rounded_loss, rounded) = results.values()
    assert 0 < float((rounded - exact).norm() / exact.norm()) < 0.05
    assert rounded_loss == pytest.approx(loss, rel=0.1)
    assert loss < 0.6  # it begins at 1.6
    dist.destroy_process_group()
