"""Two images in one: mixup (arXiv:1710.09412) and cutmix (arXiv:1905.04899).

Each image of a batch meets its neighbour; the target is the same blend of their classes. Shares and
places come from torch's generator on the CPU, so that no step waits for a number from the device.

Not torchvision's MixUp and CutMix: batches are bytes until the model normalises them, and its MixUp
multiplies in place, in the type of the images, which fails for bytes.
"""

import math

import torch
from torch.distributions import Beta
from torch.nn.functional import one_hot

from imagenet.recipes import ImageNet


def mixed(
    config: ImageNet, images: torch.Tensor, labels: torch.Tensor, classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images, mixed or not, and their targets.

    uint8 (B, channels, S, S), int64 (B,) -> the same where nothing is mixed; else images, uint8
    or float32, and float32 (B, classes). With both kinds switched on, each step draws one.
    """
    kinds = [kind for kind in (config.mixup, config.cutmix) if kind]
    if not kinds:
        return images, labels
    cut = bool(config.cutmix) and (len(kinds) == 1 or float(torch.rand(())) < 0.5)
    share = _share(config.cutmix if cut else config.mixup)
    if cut:
        images, share = _patched(images, share)
    else:
        images = torch.lerp(images.roll(1, 0).float(), images.float(), share)
    targets = one_hot(labels, classes).float()
    return images, torch.lerp(targets.roll(1, 0), targets, share)


def _share(strength: float) -> float:
    """Draw the share that an image keeps of itself from Beta(strength, strength)."""
    return float(Beta(strength, strength).sample())


def _patched(images: torch.Tensor, share: float) -> tuple[torch.Tensor, float]:
    """Return images with a square of their neighbours in them, and the share that is left."""
    height, width = images.shape[2:]
    cut = math.sqrt(1 - share) / 2
    down, across = (float(number) for number in torch.rand(2))
    top, bottom = (_within((down + side * cut) * height, height) for side in (-1, 1))
    left, right = (_within((across + side * cut) * width, width) for side in (-1, 1))
    patched = images.clone()
    patched[:, :, top:bottom, left:right] = images.roll(1, 0)[:, :, top:bottom, left:right]
    return patched, 1 - (bottom - top) * (right - left) / (height * width)


def _within(edge: float, limit: int) -> int:
    return min(max(round(edge), 0), limit)
