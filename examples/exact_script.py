#!/usr/bin/env python3
"""Your own training script with exact epochs, which resumes on any number of ranks:

./run-local --nproc 2 -- python examples/exact_script.py 3
"""

import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from rackrun import ExactSampler, report

CHECKPOINT, EPOCHS, BATCH = Path("checkpoint.pt"), int(sys.argv[1]), 64

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)  # the same data on every rank
inputs = torch.randn(1000, 8)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Linear(8, 1)
step = 0
if CHECKPOINT.exists():
    saved = torch.load(CHECKPOINT)
    model.load_state_dict(saved["model"])
    step = saved["step"]  # the sampler needs nothing else
sampler = ExactSampler(len(dataset), BATCH, seed=1, step=step)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
while sampler.epoch < EPOCHS:
    for images, targets in DataLoader(dataset, batch_sampler=sampler, num_workers=1):
        # DDP averages over the ranks: this makes it the mean over all samples of the step.
        squares = (ddp(images) - targets).square().sum()
        loss = squares * sampler.world / sampler.samples_in(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        report(step=step, loss=loss.item())
    if sampler.rank == 0:
        torch.save({"model": model.state_dict(), "step": step}, CHECKPOINT)
