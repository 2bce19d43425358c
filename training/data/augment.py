"""Augment images after crop and flip, as the long public recipes do.

trivial   one operation per image, of fourteen, by a strength drawn evenly: TrivialAugment in its
          wide form (Müller and Hutter, 2021, arXiv:2103.10158), as torchvision has it.
erased    a rectangle of the mean colour in some of the images (Zhong et al., 2017,
          arXiv:1708.04896), with the published bounds of area and shape.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import TrivialAugmentWide

from training.data.decode import Pixels

ERASED_AREA = (0.02, 0.33)  # of the image
ERASED_SHAPE = (0.3, 3.3)  # height to width
ATTEMPTS = 10  # to draw a rectangle that fits


def trivial(pixels: Pixels, random: np.random.Generator) -> Pixels:
    """Return the image after one operation: uint8 (H, W, 3), as before."""
    # torchvision draws from torch's own generator, which every step of training seeds again
    torch.default_generator.manual_seed(int(random.integers(2**63)))
    return np.asarray(_wide()(Image.fromarray(pixels)))  # on tensors it takes nearly twice as long


@functools.cache
def _wide() -> Callable[[Image.Image], Image.Image]:
    change: Callable[[Image.Image], Image.Image] = TrivialAugmentWide(
        interpolation=InterpolationMode.BILINEAR
    )
    return change


def erased(
    pixels: Pixels, share: float, color: tuple[float, ...], random: np.random.Generator
) -> Pixels:
    """Return the image, with probability `share` with a rectangle of the colour (0 to 1)."""
    if random.random() >= share:
        return pixels
    height, width = pixels.shape[:2]
    for _ in range(ATTEMPTS):
        area = height * width * random.uniform(*ERASED_AREA)
        shape = math.exp(random.uniform(*np.log(ERASED_SHAPE)))
        tall, wide = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if tall < height and wide < width:
            top, left = random.integers((height - tall + 1, width - wide + 1))
            pixels = pixels.copy()
            pixels[top : top + tall, left : left + wide] = np.rint(np.array(color) * 255)
            break
    return pixels
