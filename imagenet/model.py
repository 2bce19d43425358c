"""The models and transforms for ImageNet, and images that are mixed of two."""

import torch
from torch import nn
from torch.nn.functional import conv2d

from rackrun.errors import UsageError
from rackrun.imagenet.recipes import ImageNet
from rackrun.training.data.transforms import Transforms, augmented
from rackrun.training.models.named import named_model, normalized_for, takes_one_size
from rackrun.training.task import Task

FEWEST_BLURRED = 16  # channels; the image itself is not blurred
GRID = 32  # sides of training images are multiples of it (pixels)


def build(config: ImageNet, classes: int) -> nn.Module:
    """Build the model that the settings name; UsageError for sizes that it cannot have."""
    if takes_one_size(config.model) and (problem := config.two_sizes()):
        raise UsageError(problem)
    args = config.builder_args
    if config.zero_init_residual:
        args["zero_init_residual"] = True
    model = named_model(config.model, classes, config.judged_size, args=args)
    if config.blurs:
        blur_halvings(model)
    return model


def blur_halvings(model: nn.Module) -> None:
    """Blur what every strided convolution takes, but the first layer's (Zhang, 2019, 1904.11486).

    The weights keep their names: those of a model without blur can be loaded.
    """
    line = torch.tensor([0.25, 0.5, 0.25])
    for layer in model.modules():
        if not isinstance(layer, nn.Conv2d):
            continue
        if max(layer.stride) > 1 and layer.in_channels >= FEWEST_BLURRED:
            kernel = torch.outer(line, line).repeat(layer.in_channels, 1, 1, 1)
            layer.register_buffer("blur", kernel, persistent=False)  # float (channels, 1, 3, 3)
            layer.register_forward_pre_hook(_blurred)


def _blurred(layer: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    # float (B, channels, S, S) -> the same
    kernel = layer.get_buffer("blur").to(inputs[0].dtype)
    return conv2d(inputs[0], kernel, padding=1, groups=len(kernel))


def transforms(config: ImageNet, epoch: int) -> Transforms:
    """Return random crops that may grow with the epochs; the center for evaluation."""
    side = config.judged_size
    crops = Transforms(
        size=training_size(config, epoch),
        evaluation_size=side,
        short_side=config.short_side or round(side * 256 / 224),
        crop_area=config.crop_area,
        interpolation=config.interpolation,
    )
    return augmented(normalized_for(config.model, crops), config)


def training_size(config: ImageNet, epoch: int) -> int:
    """Return the side in this epoch: even growth from --start-image-size to --image-size."""
    first = config.grow_from_epoch
    last = config.grow_until_epoch or max(1, config.epochs * 7 // 8)
    if not config.start_image_size or epoch >= last:
        return config.image_size
    if epoch <= first:
        return config.start_image_size
    grown = (config.image_size - config.start_image_size) * (epoch - first) / (last - first)
    return round((config.start_image_size + grown) / GRID) * GRID


def mixed(
    config: ImageNet, images: torch.Tensor, labels: torch.Tensor, classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images, mixed or not, and their targets, by mixup or cutmix of torchvision.

    uint8 (B, channels, S, S), int64 (B,) -> the same where nothing is mixed; else float32 images
    and float32 (B, classes). With both kinds switched on, each step draws one. What is drawn comes
    from the CPU's generator: no step waits for a number from the device.
    """
    if not (config.mixup or config.cutmix):
        return images, labels
    from torchvision.transforms import v2  # 90 MB, which loader workers do without

    kinds = ((v2.MixUp, config.mixup), (v2.CutMix, config.cutmix))
    chosen = [kind(alpha=alpha, num_classes=classes) for kind, alpha in kinds if alpha]
    mixed_images, targets = v2.RandomChoice(chosen)(images.float(), labels)
    return mixed_images, targets


TASK = Task(
    name="imagenet",
    model=build,
    transforms=transforms,
    mix=mixed,
    synthetic_classes=1000,
)
