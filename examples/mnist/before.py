"""An ordinary PyTorch script: python before.py FOLDER EPOCHS"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

folder, epochs = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)

train_set = MNIST(folder, train=True, transform=ToTensor())
test_set = MNIST(folder, train=False, transform=ToTensor())
train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
test_loader = DataLoader(test_set, batch_size=64)

model = nn.Sequential(
    *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten()),
    *(nn.Linear(576, 64), nn.ReLU(), nn.Linear(64, 10)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

for _ in range(epochs):
    for images, labels in train_loader:
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

right = torch.zeros(())
with torch.no_grad():
    for images, labels in test_loader:
        right += (model(images).argmax(1) == labels).sum()
print(f"test accuracy {right / len(test_set):.2%}")
