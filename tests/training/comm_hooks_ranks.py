"""Started by test_comm_hooks: two ranks train with each way of exchanging gradients."""

import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rackrun.training.config import Config
from rackrun.training.sync.gradient_sync import register_comm_hook
from rackrun.training.sync.uneven_inputs import why_not_join

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
    assert bool(why_not_join(model, torch.optim.SGD(net.parameters()))) == (gradients != "float32")
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


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = {name: trained(name, rank) for name in ("float32", "bfloat16")}
    for name, (loss, weights) in results.items():
        observed = [torch.empty_like(weights) for _ in range(2)]
        dist.all_gather(observed, weights)
        assert torch.equal(*observed), name
        apart = float((weights - results["float32"][1]).norm() / results["float32"][1].norm())
        if rank == 0:
            sys.stdout.write(f"{name} {loss:.6f} {apart:.6f}\n")
    sys.stdout.flush()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
