"""Images changed by chance: what changes, how often, and the same again for the same chances."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import islice

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import ColorJitter, RandAugment, TrivialAugmentWide

from rackrun.contract.tasks import TASKS, package_of
from rackrun.imagenet.model import TASK, transforms
from rackrun.imagenet.recipes import ImageNet, TorchvisionV2
from rackrun.training.data.augment import ERASED_AREA, ERASED_SHAPE, changed, changes, erased
from rackrun.training.data.open import open_data
from rackrun.training.data.transforms import Transforms
from rackrun.training.ranks import Ranks
from tests.training.conftest import draw

SIDE = 176
PICTURE = np.full((SIDE, SIDE, 3), (10, 120, 240), np.uint8)
PICTURE[40:90, 30:120] = (200, 50, 90)


@pytest.mark.parametrize("picture", [PICTURE, PICTURE[:, :, :1]], ids=["colour", "gray"])
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


def test_a_rectangle_of_the_mean_colour_covers_some_images():
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


class Last(np.random.Generator):
    """Random numbers that are always the largest."""

    def random(self) -> float:
        return 0.0

    def uniform(self, low: float, high: float) -> float:
        return high if high < 1 else 0.0

    def integers(self, high: tuple[int, int]) -> list[int]:
        return [end - 1 for end in high]


def test_a_rectangle_may_end_in_the_corner_and_not_beyond():
    """A square of a third of the image, as far down and to the right as it goes."""
    made = erased(PICTURE, 0.1, (0.5, 0.5, 0.5), Last(np.random.PCG64()))
    mask = (made == 128).all(axis=2)
    side = round(math.sqrt(ERASED_AREA[1] * SIDE**2))
    assert mask[-side:, -side:].all()
    assert mask.sum() == side**2


def test_evaluation_sees_images_as_they_are():
    """What the strong recipe changes in training is not changed where it counts."""
    data = draw(1, 5)
    changed, plain = (
        transforms(TorchvisionV2(image_size=32), 0),
        transforms(ImageNet(image_size=32), 0),
    )
    assert changed.trivial_augment and changed.erase == 0.1
    side = {"evaluation_size": 32, "short_side": 36}
    image, other = (
        transforms(recipe(image_size=32, **side), 0).for_evaluation(data)
        for recipe in (TorchvisionV2, ImageNet)
    )
    assert np.array_equal(image, other)
    recorded = {changed.for_training(data, np.random.default_rng(n)).tobytes() for n in range(20)}
    assert len(recorded) == 20
    assert not plain.trivial_augment and not plain.erase


def test_a_batch_has_each_of_its_images_so_many_times(shapes):
    """--aug-repeats 4: sixteen images are four, cropped on their own; the same after a resume."""
    config = ImageNet(
        data=str(shapes), image_size=16, batch_size=16, aug_repeats=4, workers=0, crop_area=1.0,
        device="cpu", exact_epochs=True,
    )  # fmt: skip
    data = open_data(
        config,
        Ranks(0, 1, 0, 1, torch.device("cpu")),
        partial(TASK.transforms, config),
        TASK.name,
        TASK.synthetic_classes,
    )
    for batch in islice(data.training(0), 3):
        either = [
            min(image.numpy().tobytes(), image.flip(2).numpy().tobytes()) for image in batch.images
        ]
        assert set(Counter(either).values()) == {4}
        assert either[:4] == either[4:8] and len(set(either[:4])) == 4
    later = next(data.training(2))
    assert torch.equal(later.images, batch.images)


def test_ranks_have_a_copy_each_of_the_same_images(shapes):
    """--aug-repeats 4 on two ranks: two copies in each batch, cropped and mirrored apart."""
    config = ImageNet(
        data=str(shapes), image_size=16, batch_size=16, aug_repeats=4, workers=0, crop_area=1.0,
        device="cpu", exact_epochs=True,
    )  # fmt: skip
    observed, exact = [], []
    for rank in (0, 1):
        ranks = Ranks(rank, 2, rank, 2, torch.device("cpu"))
        data = open_data(config, ranks, partial(TASK.transforms, config), TASK.name, 10)
        images = next(data.training(3)).images
        either = (min(image.numpy().tobytes(), image.flip(2).numpy().tobytes()) for image in images)
        observed.append(Counter(either))
        exact.append(images.clone())
    assert observed[0] == observed[1] and set(observed[0].values()) == {2}
    assert not torch.equal(*exact)
