"""Models as users write them; tests copy this file into a project as `models.py`."""

import os
import threading

import torch
from torch import nn
from torch.nn import functional


class Small(nn.Sequential):
    """A net that learns colors in a few epochs."""

    def __init__(self, num_classes):
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(16, num_classes),
        )


class Pooled(nn.Module):
    """A convolution and a head over the mean of its features; others change one thing of it."""

    def __init__(self, num_classes):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2)
        self.head = nn.Linear(8, num_classes)

    def forward(self, images):
        return self.head(functional.relu(self.conv(images)).mean((2, 3)))


class View(nn.Module):
    """A tutorial's: convolution, pooling, x.view, Linear, for images of 32 pixels."""

    def __init__(self, num_classes):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 5)
        self.head = nn.Linear(6 * 14 * 14, num_classes)

    def forward(self, images):
        features = functional.max_pool2d(functional.relu(self.conv(images)), 2)
        return self.head(features.view(features.size(0), -1))


class OfOtherSize(View):
    """One for images of 44 pixels."""

    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.head = nn.Linear(6 * 20 * 20, num_classes)


class Unused(Pooled):
    """One that keeps a layer which forward does not use."""

    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.old_head = nn.Linear(8, 1000)


class SkippedByOneRank(Pooled):
    """One that uses a layer in all steps but one, in which only one rank skips it."""

    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.steps, self.extra = 0, nn.Linear(8, 8)

    def forward(self, images):
        features = functional.relu(self.conv(images)).mean((2, 3))
        self.steps += self.training
        skips = self.steps == 3 and os.environ.get("RANK") == "1"
        return self.head(features if skips else features + self.extra(features))


class Misfit(Small):
    """One whose layers do not fit: torch complains in lines of its own."""

    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.one_more = nn.Conv2d(3, 8, 3)


class Dictionary(Small):
    """One that answers with more than logits, as those of Hugging Face do."""

    def forward(self, images):
        return {"logits": super().forward(images)}


class Held(Small):
    """One that holds what cannot be copied, and a generator of its own."""

    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.lock = threading.Lock()
        self.generator = torch.Generator().manual_seed(0)


class Unsaved(Small):
    """One that wants to save what no checkpoint can hold."""

    def get_extra_state(self):
        return {"lock": threading.Lock()}

    def set_extra_state(self, state):
        pass


class Lazy(nn.Module):
    """One whose layers learn their sizes from the first batch."""

    def __init__(self, num_classes):
        super().__init__()
        self.conv = nn.LazyConv2d(8, 3, stride=2)
        self.head = nn.LazyLinear(num_classes)

    def forward(self, images):
        return self.head(torch.flatten(functional.relu(self.conv(images)), 1))


class WeightNormed(Pooled):
    """One with torch's old weight_norm, which cannot be copied deeply."""

    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.conv = nn.utils.weight_norm(nn.Conv2d(3, 8, 3))


class Standardised(Pooled):
    """One that divides each image by its deviation: NaN for an image of one color.

    A batch norm spreads it to all images of the batch.
    """

    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.conv = nn.Sequential(self.conv, nn.BatchNorm2d(8))

    def forward(self, images):
        deviation = images.std((2, 3), keepdim=True)
        return super().forward((images - images.mean((2, 3), keepdim=True)) / deviation)


class Softmax(Small):
    """One that ends in probabilities, although the loss takes logits."""

    def forward(self, images):
        return super().forward(images).softmax(1)


class Sigmoid(Small):
    """One that ends in a probability of each class by itself."""

    def forward(self, images):
        return super().forward(images).sigmoid()


class Wrapped(nn.Module):
    """One that holds a published net below a name of its own."""

    def __init__(self, num_classes):
        super().__init__()
        self.net = Small(num_classes)

    def forward(self, images):
        return self.net(images * 0.5)
