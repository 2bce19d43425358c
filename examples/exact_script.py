#!/usr/bin/env python3
"""Your own training script with exact epochs, which resumes on any number of ranks:

./run-local --nproc 2 -- python examples/exact_script.py 3
"""

import sys
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from rackrun import ExactSampler, report

CHECKPOINT, EPOCHS, BATCH = Path("checkpoint.pt"), int(sys.argv[1]), 64

torch.distributed.init_process_group("gloo")
world = torch.distributed.get_world_size()
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(1000, 8, generator=generator)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Linear(8, 1)
torch.nn.init.zeros_(model.weight)
torch.nn.init.zeros_(model.bias)
step = 0
if CHECKPOINT.exists():
    saved = torch.load(CHECKPOINT)
    model.load_state_dict(saved["model"])
    step = saved["step"]  # the sampler needs nothing else
sampler = ExactSampler(len(dataset), BATCH, seed=1, step=step)
loader = DataLoader(dataset, batch_sampler=sampler, num_workers=1)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
while sampler.epoch < EPOCHS:
    for images, targets in loader:
        # DDP averages over the ranks: this makes it the mean over all samples of the step.
        loss = mse_loss(ddp(images), targets, reduction="sum") * world / sampler.samples_in(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        report(step=step, loss=loss.item())
    if torch.distributed.get_rank() == 0:
        torch.save({"model": model.state_dict(), "step": step}, CHECKPOINT)
