"""How an image becomes what a model sees."""

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from examples import own_task
from rackrun.catdog.model import TASK as catdog_task
from rackrun.catdog.recipes import CatDog
from rackrun.errors import UsageError
from rackrun.imagenet.recipes import ImageNet
from rackrun.mnist.model import TASK as mnist_task
from rackrun.mnist.recipes import Mnist
from rackrun.training.data.augment import ERASED_AREA, ERASED_SHAPE
from rackrun.training.data.decode import RATIO
from rackrun.training.data.transforms import Transforms
from rackrun.training.models.named import normalized_for
from rackrun.training.tasks.classify.model import TASK as classify
from rackrun.training.tasks.classify.recipes import Classify
from tests.lab.data import textured


@pytest.mark.parametrize("pictures", [4, 0])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_normalized_color_by_color(channels, pictures):
    """(pixel / 255 - mean) / deviation, whatever the layout in memory; no images stay none."""
    mean, deviation = (0.4, 0.5, 0.6)[:channels], (0.1, 0.2, 0.3)[:channels]
    transforms = Transforms(size=6, channels=channels, mean=mean, deviation=deviation)
    images = torch.randint(256, (pictures, 6, 6, channels), dtype=torch.uint8)
    images = images.permute(0, 3, 1, 2)
    expected = (images / 255 - torch.tensor(mean).view(1, -1, 1, 1)) / torch.tensor(deviation).view(
        1, -1, 1, 1
    )
    for layout in (images, images.contiguous()):
        result = transforms.normalized(layout)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, expected)


def test_models_see_the_normalization_of_their_published_weights():
    """Every model of torchvision gets the mean and deviation that torchvision publishes with its
    weights; those of ImageNet are the default, of timm's as of ours. Torchvision's googlenet and
    inception_v3 turn ImageNet's back into (x - 0.5) / 0.5 themselves, which ours get at once."""
    import timm.data.constants

    plain = Transforms(size=32)
    assert plain.mean == timm.data.constants.IMAGENET_DEFAULT_MEAN == (0.485, 0.456, 0.406)
    assert plain.deviation == timm.data.constants.IMAGENET_DEFAULT_STD == (0.229, 0.224, 0.225)
    for name in torchvision.models.list_models(module=torchvision.models):
        published = torchvision.models.get_model_weights(name).DEFAULT.transforms()
        expected = tuple(published.mean), tuple(published.std)
        if name in ("googlenet", "inception_v3"):
            expected = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
        ours = normalized_for(name, plain)
        assert (ours.mean, ours.deviation) == expected, name


def test_published_weights_bring_size_crop_and_kernel():
    """What is typed counts more; weights of one's own, and none, see 224 of 256 pixels."""
    for name in ("resnet50", "efficientnet_b3", "vit_h_14", "inception_v3"):
        preset = torchvision.models.get_model_weights(name).DEFAULT.transforms()
        config = classify.resolve(Classify(model=name))
        transforms = classify.transforms(config, 0)
        assert [transforms.size] == preset.crop_size
        assert [transforms.short_side] == preset.resize_size
        assert transforms.interpolation == preset.interpolation.value
    config = classify.resolve(Classify(model="timm:test_vit"))
    assert (config.image_size, config.short_side, config.interpolation) == (160, 168, "bicubic")
    half = classify.resolve(Classify(model="efficientnet_b3", image_size=150))
    assert (half.side, half.short_side, half.interpolation) == (150, 160, "bicubic")
    for weights in ("", "mine.pth"):
        config = classify.resolve(Classify(model="efficientnet_b3", weights=weights))
        assert classify.transforms(config, 0) == Transforms(224, 0, 3, 256, crop_area=0.35)


def test_mean_and_std_are_typed_for_any_model():
    """A number for each channel or for all; what is not used is refused."""
    config = Classify(model="my_models:Net", mean="0.5", std="0.1,0.2,0.3")
    transforms = classify.transformed(config, 0)
    assert (transforms.mean, transforms.deviation) == ((0.5,) * 3, (0.1, 0.2, 0.3))
    assert transforms.described() == "224 of 256 px, mean 0.5,0.5,0.5, std 0.1,0.2,0.3"
    gray = catdog_task.transformed(CatDog(gray=True, mean="0.1", std="0.2"), 0)
    assert (gray.mean, gray.deviation) == ((0.1,), (0.2,))
    with pytest.raises(UsageError, match="3 numbers for images of 1 channel"):
        catdog_task.transformed(CatDog(gray=True, mean="0,0,0", std="1"), 0)
    with pytest.raises(UsageError, match=r"transforms\(\) does not use --mean and --std"):
        own_task.TASK.transformed(own_task.Settings(mean="0.5", std="0.5"), 0)


def test_gray_tasks_see_their_published_normalization():
    """MNIST's mean and deviation are those of its 60,000 training images, gray cats and dogs have
    one channel's."""
    digits = mnist_task.transforms(Mnist(), 0)
    assert (digits.mean, digits.deviation) == ((0.1307,), (0.3081,))
    gray = catdog_task.transforms(CatDog(gray=True), 0)
    assert (gray.mean, gray.deviation) == ((0.45,), (0.25,))


def test_random_crops_and_erased_rectangles_have_their_published_bounds():
    """Inception's crops: 8 to 100 % of the area, 3:4 to 4:3. Random Erasing: 2 to 33 % of the area,
    0.3 to 3.3, as torchvision draws it."""
    from inspect import signature

    from torchvision.transforms.v2 import RandomErasing, RandomResizedCrop

    crop, erasing = (
        signature(transform).parameters for transform in (RandomResizedCrop, RandomErasing)
    )
    assert crop["ratio"].default == RATIO == (3 / 4, 4 / 3)
    assert (crop["scale"].default) == (ImageNet().crop_area, 1.0) == (0.08, 1.0)
    assert erasing["scale"].default == ERASED_AREA == (0.02, 0.33)
    assert erasing["ratio"].default == ERASED_SHAPE == (0.3, 3.3)


def test_gray_is_what_pillow_calls_gray():
    """One channel, weighted as the standard says."""
    data = textured(1, (100, 100))
    color = Transforms(size=40).for_evaluation(data)
    gray = Transforms(size=40, channels=1).for_evaluation(data)
    assert gray.shape == (40, 40, 1)
    assert np.array_equal(gray[:, :, 0], np.asarray(Image.fromarray(color).convert("L")))


def test_training_crops_and_mirrors_by_chance_and_can_be_repeated():
    """The same random numbers give the same crop; without crops only the mirror is left."""
    data = textured(1, (120, 80))
    transforms = Transforms(size=24, crop_area=0.5)
    observed = [transforms.for_training(data, np.random.default_rng(seed)) for seed in (1, 1, 2, 3)]
    assert np.array_equal(observed[0], observed[1])
    assert not np.array_equal(observed[0], observed[2])
    assert all(pixels.shape == (24, 24, 3) for pixels in observed)
    plain = Transforms(size=24)
    whole = plain.for_evaluation(data)
    chances = [plain.for_training(data, np.random.default_rng(seed)) for seed in range(20)]
    mirrored = [np.array_equal(pixels, whole[:, ::-1]) for pixels in chances]
    assert 0 < sum(mirrored) < 20
    assert all(
        mirror or np.array_equal(pixels, whole)
        for mirror, pixels in zip(mirrored, chances, strict=True)
    )
    still = Transforms(size=24, flip=False)
    assert np.array_equal(still.for_training(data, np.random.default_rng(0)), whole)
