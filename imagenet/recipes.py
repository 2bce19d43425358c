"""The recipes for ImageNet: settings with names. None of this needs torch.

--lr is given for the images of one rank and multiplied by the number of ranks (--scale-lr): with
another --batch-size, change it in proportion.
"""

from dataclasses import dataclass
from typing import Literal

from training.config import Config, Shape


@dataclass(frozen=True)
class ImageNet(Config):
    """Train a classifier on ImageNet: the classic recipe of ResNet-50.

    SGD, 0.1 for 256 images, divided by ten every 30 epochs, 90 epochs, random crops. Published
    for it: 76.1 % (torchvision). 115 million images: 13 hours at 2,500 images/s. Here: not
    measured.
    """

    recipe: str = "classic"
    """Set of defaults to start from: classic, fast16, fast32, strong."""
    start_image_size: int = 0
    """Side in the first epochs; it grows evenly to --image-size; 0: as --image-size (pixels)."""
    evaluation_size: int = 0
    """Side of the square that is evaluated; 0: as --image-size (pixels)."""
    short_side: int = 0
    """Shorter side before the centre is cut out; 0: 256 for every 224 of the square (pixels)."""
    crop_area: float = 0.08
    """Smallest share of an image that a training crop keeps; 1: no random crops."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Interpolation of resizing, always antialiased."""
    blur_pool: bool = False
    """Blur before each halving convolution, so that a shift by a pixel changes less."""
    mixup: float = 0.0
    """Blend pairs of images, shares drawn from Beta(x, x); 0: never."""
    cutmix: float = 0.0
    """Put a part of one image into another, shares drawn from Beta(x, x); 0: never."""
    trivial_augment: bool = False
    """Change each training image by one operation of random strength (TrivialAugment)."""
    random_erasing: float = 0.0
    """Share of training images in which a rectangle is covered by the mean colour."""

    epochs: int = 90
    batch_size: int = 256
    lr: float = 0.1
    scale_lr: bool = True
    lr_schedule: Shape = "step"
    step_epochs: int = 30
    warmup_epochs: float = 5.0
    weight_decay: float = 1e-4


@dataclass(frozen=True)
class Fast16(ImageNet):
    """Train a classifier on ImageNet in 16 epochs.

    Images that grow from 160 to 192, evaluated at 256; label smoothing, blur before halving.
    Published for such a recipe: 73.8 % in 15 minutes on 8 A100 (FFCV, 16 epochs, with
    test-time flips, which are left out here). Here: not measured.
    """

    recipe: str = "fast16"
    epochs: int = 16
    image_size: int = 192
    start_image_size: int = 160
    evaluation_size: int = 256
    crop_area: float = 0.35
    blur_pool: bool = True
    lr: float = 0.5
    lr_schedule: Shape = "cosine"
    warmup_epochs: float = 2.0
    weight_decay: float = 5e-5
    label_smoothing: float = 0.1


@dataclass(frozen=True)
class Fast32(Fast16):
    """Train a classifier on ImageNet in 32 epochs.

    As fast16, with an average of the weights. Published for such a recipe: 76.6 % in 29 minutes on
    8 A100 (FFCV, 32 epochs). Here: not measured.
    """

    recipe: str = "fast32"
    epochs: int = 32
    crop_area: float = 0.25
    ema_decay: float = 0.9998


@dataclass(frozen=True)
class Strong(ImageNet):
    """Train a classifier on ImageNet for long, with strong augmentation.

    Cosine decay, label smoothing, TrivialAugment, random erasing, mixup and cutmix, an average of
    the weights, each image four times per draw, trained at 176 and evaluated at 224, 600 epochs.
    Published for torchvision's recipe of this kind: 80.9 %; 80.7 % without the repetition.
    769 million images: 85 hours at 2,500 images/s. Other than there, the four copies of an image
    are in one rank's batch, not on four ranks; momentum is Nesterov's; and the average moves a
    little at every step, not more at every 32nd.
    Here: not measured.
    """

    recipe: str = "strong"
    epochs: int = 600
    batch_size: int = 128
    image_size: int = 176
    evaluation_size: int = 224
    short_side: int = 232
    mixup: float = 0.2
    cutmix: float = 1.0
    lr: float = 0.0625
    lr_schedule: Shape = "cosine"
    weight_decay: float = 2e-5
    label_smoothing: float = 0.1
    trivial_augment: bool = True
    random_erasing: float = 0.1
    aug_repeats: int = 4
    ema_decay: float = 0.99997


RECIPES: dict[str, type[ImageNet]] = {
    "default": ImageNet,
    "classic": ImageNet,
    "fast16": Fast16,
    "fast32": Fast32,
    "strong": Strong,
}
