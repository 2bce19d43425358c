"""Gradients in fewer bytes, for networks on which their exchange takes longer than backward.

bfloat16   Half the bytes of float32; sums lose about two digits. Pays when the table that
           --synthetic prints shows an exchange beyond backward.
powersgd   Matrices of rank 2 in place of the gradients of large layers (Vogels et al., 2019,
           arXiv:1905.13727), after a tenth of the run in which they travel whole. Tens of times
           fewer bytes and more arithmetic: pays on 1 GbE and 10 GbE with large layers. What a step
           leaves out is added to the next one; that remainder is not in checkpoints, so a run that
           goes on drops the last one.

The averages are the same on all ranks, so ranks never drift apart.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from training.settings.ranks import SyncSettings

RANK = 2  # of the matrices that stand for a gradient
WHOLE_SHARE = 0.1  # of the run's steps, in which gradients travel whole under powersgd


def register_comm_hook(model: nn.Module, config: SyncSettings, steps: int, done: int) -> None:
    """Have a model's gradients exchanged as the settings ask, in a run of this many steps."""
    if not isinstance(model, DistributedDataParallel):
        return
    if config.grad_compression == "bfloat16":
        model.register_comm_hook(None, _in_bfloat16)
    elif config.grad_compression == "powersgd":
        whole = max(2, round(steps * WHOLE_SHARE) - done)  # torch needs two steps to warm up
        state = PowerSGDState(None, RANK, start_powerSGD_iter=whole)
        model.register_comm_hook(state, powerSGD_hook)


def _in_bfloat16(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the average of a bucket over all ranks, exchanged in bfloat16."""
    whole = bucket.buffer()
    # Divided before the sum: DDP expects a mean, and takes what the hook leaves as it is.
    short = whole.to(torch.bfloat16).div_(dist.get_world_size())
    exchange = dist.all_reduce(short, async_op=True)
    assert exchange is not None
    future: torch.futures.Future[Any] = exchange.get_future()
    return future.then(lambda done: whole.copy_(done.value()[0]))


def gradient_buffer_like(model: nn.Module, config: SyncSettings) -> torch.Tensor | None:
    """Return a tensor of the size and type of a step's gradients; None where it is no sum."""
    if config.grad_compression == "powersgd" or config.local_sgd_steps:
        return None
    if not isinstance(model, DistributedDataParallel):
        return None
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    kind = torch.bfloat16 if config.grad_compression == "bfloat16" else torch.float32
    count = sum(weight.numel() for weight in weights)
    return torch.zeros(count, dtype=kind, device=weights[0].device)
