"""The recipes for ImageNet: settings with names. None of this needs torch.

--lr is given for the images of one rank and multiplied by the number of ranks (--scale-lr): with
another --batch-size, change it in proportion.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from rackrun.commandline.conditions import Condition
from rackrun.commandline.ranges import Between, Count
from rackrun.training.config import Config
from rackrun.training.models.registered import has_one_size
from rackrun.training.settings.data import CropArea
from rackrun.training.settings.optim import Optimizer, Shape

OWN_MODELS: tuple[str, ...] = ()
Size = Annotated[int, Between(0, 4096, "between 0 and 4096 pixels")]
Beta = Annotated[float, Between(0, 100)]


@dataclass(frozen=True)
class ImageNet(Config):
    """Train a classifier on ImageNet in 90 epochs, as in the classic recipes for ResNet-50.

    SGD with Nesterov's momentum, 0.1 for 256 images after 5 epochs of warm-up, divided by ten every
    30 epochs, random crops. 115 million images: 13 hours at 2,500 images/s. Accuracy: not measured.
    """

    recipe: str = "default"
    """Set of defaults to start from: default; as published: torchvision-v1, torchvision-v2, ffcv16,
    timm-a3."""
    start_image_size: Size = 0
    """Side in the first epochs, in pixels, which then grows to --image-size; 0: --image-size."""
    grow_from_epoch: Count = 0
    """Epoch (from 0) at which images begin to grow from --start-image-size."""
    grow_until_epoch: Count = 0
    """Epoch from which on images have --image-size; 0: after 7/8 of all epochs."""
    evaluation_size: Size = 0
    """Side of the square in evaluations, in pixels; 0: --image-size."""
    short_side: Size = 0
    """Shorter side before the center crop, in pixels; 0: 256/224 of the side of the square."""
    crop_area: CropArea = 0.08
    """Smallest fraction of an image that a training crop keeps; 1: no random crops."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Interpolation of resizing, always antialiased."""
    zero_init_residual: bool = False
    """Initialize the last norm of each residual block to 0, so that each block of a ResNet begins
    as the identity."""
    mixup: Beta = 0.0
    """Blend pairs of images, in proportions drawn from Beta(x, x); 0: never."""
    cutmix: Beta = 0.0
    """Paste a part of one image into another, in proportions drawn from Beta(x, x); 0: never."""
    own_conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("grow_from_epoch", "grow_until_epoch"),
            lambda config: config.start_image_size > 0,
            "images have --image-size {config.image_size} from the start",
            "--start-image-size 160",
        ),
    )

    exact_epochs: bool = False
    epochs: int = 90
    batch_size: int = 256
    lr: float = 0.1
    scale_lr: bool = True
    lr_schedule: Shape = "step"
    step_epochs: int = 30
    warmup_epochs: float = 5.0
    weight_decay: float = 1e-4

    @property
    def blurs(self) -> bool:
        """Whether the model blurs before each strided convolution, as FFCV's does."""
        return self.recipe == "ffcv16"

    @property
    def judged_size(self) -> int:
        """The side of the evaluated square (pixels)."""
        return self.evaluation_size or self.image_size

    def two_sizes(self) -> str:
        """Return why no model for images of one size can be trained, or ""."""
        for size in (self.start_image_size, self.image_size):
            if size not in (0, self.judged_size):
                return (
                    f"--model {self.model}: is built for images of one size, which would have"
                    f" {size} pixels in training and {self.judged_size} in evaluation; type"
                    f" --image-size {self.judged_size} --start-image-size 0"
                )
        return ""

    def problems(self) -> list[str]:
        """Refuse a model for images of one size that would get two."""
        problems = super().problems()
        if has_one_size(self.model) and (problem := self.two_sizes()):
            problems.append(problem)
        return problems


@dataclass(frozen=True)
class TorchvisionV1(ImageNet):
    """Train ResNet-50 as torchvision did for its first weights: IMAGENET1K_V1, 76.130 %.

    Plain momentum, decay of all weights, no warm-up, 8 ranks with 32 images each:
    https://github.com/pytorch/vision/tree/main/references/classification. Here: not measured.
    """

    recipe: str = "torchvision-v1"
    batch_size: int = 32
    lr: float = 0.0125
    warmup_epochs: float = 0.0
    nesterov: bool = False
    decays_all: ClassVar[bool] = True


@dataclass(frozen=True)
class TorchvisionV2(ImageNet):
    """Train ResNet-50 as torchvision did for its newer weights: IMAGENET1K_V2, 80.858 %.

    Cosine decay, label smoothing, TrivialAugment, random erasing, mixup and cutmix, each image four
    times per draw, on four ranks; an average that moves every 32 steps; trained at 176, evaluated
    at 224, for 600 epochs with 8 ranks of 128 images: https://pytorch.org/blog/how-to-train-state-
    of-the-art-models-using-torchvision-latest-primitives/. There biases are decayed, and the
    average begins when the warm-up ends. Here: not measured.
    """

    recipe: str = "torchvision-v2"
    exact_epochs: bool = True
    epochs: int = 600
    nesterov: bool = False
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
    ema_decay: float = 1 - (1 - 0.99998) * 1024 * 32 / 600
    ema_steps: int = 32


@dataclass(frozen=True)
class TimmA3(ImageNet):
    """Train ResNet-50 with the constants of timm's procedure A3, for which 78.1 % is published.

    LAMB, binary cross-entropy with a threshold of 0.2, RandAugment, mixup and cutmix; 100 epochs of
    2,048 images at 160, evaluated at 224: https://arxiv.org/abs/2110.00476, table 2. RandAugment is
    torchvision's: strength 6 of 10 is 18 of 30 here, and does not vary. Here: not measured.
    """

    recipe: str = "timm-a3"
    epochs: int = 100
    batch_size: int = 256
    image_size: int = 160
    evaluation_size: int = 224
    short_side: int = 235
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    optimizer: Optimizer = "lamb"
    lr: float = 0.001
    lr_schedule: Shape = "cosine"
    weight_decay: float = 0.02
    loss: Literal["ce", "bce"] = "bce"
    bce_threshold: float = 0.2
    mixup: float = 0.1
    cutmix: float = 1.0
    rand_augment: int = 18
    zero_init_residual: bool = True


@dataclass(frozen=True)
class Ffcv16(ImageNet):
    """Train ResNet-50 with the constants of FFCV's 16 epochs, for which it published 73.8 %.

    Plain momentum, a rate of 1.7 for 4,096 images that rises for 2 epochs and falls in a line,
    images of 160 that grow to 192 from epoch 11 to 13, evaluated at 256 with their mirror images, a
    blur before each strided convolution: https://github.com/libffcv/ffcv-imagenet, rn50_configs.
    Published: 14.9 minutes on 8 A100. The
    norms of its shortcuts and the last bias are decayed there, and not here; it stored images of at
    most 500 pixels, half of them as JPEG. Here: not measured.
    """

    recipe: str = "ffcv16"
    epochs: int = 16
    exact_epochs: bool = True
    batch_size: int = 512
    image_size: int = 192
    start_image_size: int = 160
    grow_from_epoch: int = 11
    grow_until_epoch: int = 13
    evaluation_size: int = 256
    eval_flip: bool = True
    lr: float = 0.2125
    lr_schedule: Shape = "linear"
    warmup_epochs: float = 2.0
    nesterov: bool = False
    label_smoothing: float = 0.1


RECIPES: dict[str, type[ImageNet]] = {
    "default": ImageNet,
    "torchvision-v1": TorchvisionV1,
    "torchvision-v2": TorchvisionV2,
    "ffcv16": Ffcv16,
    "timm-a3": TimmA3,
}
