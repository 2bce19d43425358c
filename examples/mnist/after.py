"""The same script on any number of hosts: ./run-ssh hosts.txt -- python after.py FOLDER EPOCHS"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

folder, epochs = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

train_set = MNIST(folder, train=True, transform=ToTensor())
test_set = MNIST(folder, train=False, transform=ToTensor())
sampler = DistributedSampler(train_set)
train_loader = DataLoader(train_set, batch_size=64 // world, sampler=sampler)
test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), batch_size=64)

model = nn.Sequential(
    *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten()),
    *(nn.Linear(576, 64), nn.ReLU(), nn.Linear(64, 10)),
)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

for epoch in range(epochs):
    sampler.set_epoch(epoch)
    for images, labels in train_loader:
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

right = torch.zeros(())
with torch.no_grad():
    for images, labels in test_loader:
        right += (model(images).argmax(1) == labels).sum()
dist.all_reduce(right)
if rank == 0:
    print(f"test accuracy {right / len(test_set):.2%}")
dist.destroy_process_group()
