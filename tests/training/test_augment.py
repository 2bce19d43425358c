"""Pictures changed by chance: what changes, how often, and the same again for the same chances."""

from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from imagenet.model import TASK, transforms
from imagenet.recipes import ImageNet, Strong
from rackrun.errors import UsageError
from tests.training.conftest import draw
from training.data.augment import ERASED_AREA, ERASED_SHAPE, erased, trivial
from training.data.open import open_data
from training.data.samples import repeated
from training.ranks import Ranks

SIDE = 176
PICTURE = np.full((SIDE, SIDE, 3), (10, 120, 240), np.uint8)
PICTURE[40:90, 30:120] = (200, 50, 90)


def test_one_operation_changes_a_picture_by_chance_alone() -> None:
    """Many pictures come out of one, all of its size; the same chances give the same one."""
    made = [trivial(PICTURE, np.random.default_rng(seed)) for seed in range(60)]
    assert {(one.shape, one.dtype) for one in made} == {(PICTURE.shape, PICTURE.dtype)}
    assert len({one.tobytes() for one in made}) > 30
    torch.manual_seed(99)  # what torch drew before does not matter
    again = [trivial(PICTURE, np.random.default_rng(seed)) for seed in range(60)]
    assert all(map(np.array_equal, made, again))


def test_a_rectangle_of_the_mean_colour_covers_some_pictures() -> None:
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


def test_evaluation_sees_pictures_as_they_are() -> None:
    """What the strong recipe changes in training is not changed where it counts."""
    data = draw(1, 5)
    changed, plain = transforms(Strong(image_size=32), 0), transforms(ImageNet(image_size=32), 0)
    assert changed.trivial_augment and changed.erase == 0.1
    side = {"evaluation_size": 32, "short_side": 36}
    one, other = (
        transforms(recipe(image_size=32, **side), 0).for_evaluation(data)  # type: ignore[arg-type]
        for recipe in (Strong, ImageNet)
    )
    assert np.array_equal(one, other)
    seen = {changed.for_training(data, np.random.default_rng(n)).tobytes() for n in range(20)}
    assert len(seen) == 20
    assert not plain.trivial_augment and not plain.erase


def test_copies_of_a_picture_stand_apart() -> None:
    """Neighbours in a batch, which mixing blends, are different pictures."""
    assert "".join(repeated("abcdefgh", 2, 4)) == "abcdabcdefghefgh"  # type: ignore[arg-type]
    assert "".join(repeated("abcde", 3, 2)) == "abababcdcdcdeee"  # type: ignore[arg-type]
    assert "".join(repeated("abc", 1, 2)) == "abc"  # type: ignore[arg-type]


def test_a_batch_has_each_of_its_pictures_so_many_times(shapes: Path) -> None:
    """--aug-repeats 4: sixteen images are four, cropped on their own; the same after a resume."""
    config = ImageNet(
        data=str(shapes), image_size=16, batch_size=16, aug_repeats=4, workers=0, crop_area=1.0,
        device="cpu",
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


def test_repeats_are_refused_where_an_epoch_is_planned() -> None:
    """An exact epoch shows every picture once; chosen samples have weights of their own."""
    with pytest.raises(UsageError, match="type --aug-repeats 1"):
        Strong(exact_epochs=True)
    with pytest.raises(UsageError, match="type --aug-repeats 1"):
        Strong(max_train_samples=100)
    assert Strong(exact_epochs=True, aug_repeats=1).trivial_augment
