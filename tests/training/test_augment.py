"""Images changed by chance: what changes, how often, and the same again for the same chances."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import islice

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import ColorJitter, RandAugment, TrivialAugmentWide

from rackrun.contract.tasks import TASKS, package_of
from rackrun.imagenet.model import TASK
from rackrun.imagenet.recipes import ImageNet
from rackrun.training.data.augment import ERASED_AREA, ERASED_SHAPE, changed, changes, erased
from rackrun.training.data.open import open_data
from rackrun.training.data.transforms import Transforms
from rackrun.training.ranks import Ranks
from tests.training.conftest import draw

SIDE = 176
PICTURE = np.full((SIDE, SIDE, 3), (10, 120, 240), np.uint8)
PICTURE[40:90, 30:120] = (200, 50, 90)


@pytest.mark.parametrize("picture", [PICTURE, PICTURE[:, :, :1]], ids=["color", "gray"])
@pytest.mark.parametrize(
    "chosen",
    [(0.4, False, 0), (0.0, True, 0), (0.0, False, 9)],
    ids=["jitter", "trivial", "rand"],
)
def test_each_policy_changes_an_image_by_chance_alone(chosen, picture):
    """Many images come out of one, all of its size; the same chances give the same one."""
    (change,) = changes(*chosen)
    made = [changed(picture, change, np.random.default_rng(seed)) for seed in range(40)]
    assert {(image.shape, image.dtype) for image in made} == {(picture.shape, picture.dtype)}
    assert len({image.tobytes() for image in made}) > 15
    torch.manual_seed(99)  # what torch drew before does not matter
    again = [changed(picture, change, np.random.default_rng(seed)) for seed in range(40)]
    assert all(map(np.array_equal, made, again))


def test_policies_are_torchvisions_with_the_strength_that_was_asked_for():
    """In this order, all of them with bilinear interpolation; what is 0 is left out."""
    jitter, trivial, rand = changes(0.4, True, 9)
    assert isinstance(jitter, ColorJitter) and jitter.hue is None
    assert jitter.brightness == jitter.contrast == jitter.saturation == (0.6, 1.4)
    assert isinstance(trivial, TrivialAugmentWide) and trivial.num_magnitude_bins == 31
    assert isinstance(rand, RandAugment) and (rand.num_ops, rand.magnitude) == (2, 9)
    for policy in (trivial, rand):
        assert policy.interpolation == InterpolationMode.BILINEAR
    assert changes(0.0, False, 0) == ()


def test_options_reach_the_images_of_every_task():
    """Flips, jitter and policies of the settings are those of the transforms; digits never flip."""
    chosen = {"vertical_flip": True, "color_jitter": 0.3, "rand_augment": 3, "random_erasing": 0.2}
    for name in TASKS:
        package = package_of(name)
        settings = import_module(f"{package}.recipes").RECIPES["default"](**chosen)
        result = import_module(f"{package}.model").TASK.transforms(settings, 0)
        assert result.vertical_flip and result.rand_augment == 3
        assert (result.color_jitter, result.erase) == (0.3, 0.2)
        assert result.flip == (name != "mnist")


def test_a_vertical_flip_turns_half_of_the_images_upside_down():
    """It is drawn on its own, and changes nothing else."""
    data, plain = draw(1, 5), Transforms(40, flip=False)
    upright = plain.for_evaluation(data)
    turning = replace(plain, vertical_flip=True)
    turned = [turning.for_training(data, np.random.default_rng(seed)) for seed in range(60)]
    same = [image for image in turned if np.array_equal(image, upright)]
    assert 15 < len(same) < 45
    assert sum(np.array_equal(image[::-1], upright) for image in turned) == 60 - len(same)


def test_a_rectangle_of_the_mean_color_covers_some_images():
    """A tenth of them, by the published bounds of area and shape, anywhere; the rest untouched."""
    color = (0.485, 0.456, 0.406)
    covered, touched = 0, np.zeros((SIDE, SIDE), bool)
    for seed in range(2000):
        made = erased(PICTURE, 0.1, color, np.random.default_rng(seed))
        if made is PICTURE:
            continue
        covered += 1
        mask = (made == np.array([124, 116, 104])).all(axis=2)
        down, across = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        tall, wide = np.ptp(down) + 1, np.ptp(across) + 1
        assert mask.sum() == tall * wide
        assert ERASED_AREA[0] * 0.9 < tall * wide / SIDE**2 < ERASED_AREA[1] * 1.1
        assert ERASED_SHAPE[0] * 0.9 < tall / wide < ERASED_SHAPE[1] * 1.1
        assert np.array_equal(made[~mask], PICTURE[~mask])
        touched |= mask
    assert 150 < covered < 250
    assert touched.mean() > 0.95


def test_a_batch_has_each_of_its_images_so_many_times(shapes):
    """--aug-repeats 4: four images in a batch of sixteen, cropped and mirrored on their own; two
    ranks have two copies each; the same after a resume."""
    config = ImageNet(
        data=str(shapes), image_size=16, batch_size=16, aug_repeats=4, workers=0, crop_area=1.0,
        device="cpu", exact_epochs=True,
    )  # fmt: skip

    def drawn(rank: int, world: int, start: int) -> Iterator[tuple[torch.Tensor, Counter[bytes]]]:
        ranks = Ranks(rank, world, rank, world, torch.device("cpu"))
        data = open_data(config, ranks, [TASK.transforms(config, 0)], TASK.name, 10)
        for images in (batch.images.clone() for batch in data.training(start)):
            both = zip(images, images.flip(3), strict=True)
            yield images, Counter(min(each.numpy().tobytes() for each in pair) for pair in both)

    (_, _), (_, _), (third, counts) = islice(drawn(0, 1, 0), 3)
    assert set(counts.values()) == {4}
    assert torch.equal(next(drawn(0, 1, 2))[0], third)
    (first, of_first), (second, of_second) = (next(drawn(rank, 2, 3)) for rank in (0, 1))
    assert of_first == of_second and set(of_first.values()) == {2}
    assert not torch.equal(first, second)
