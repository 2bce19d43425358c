"""Fixtures of the tests of ImageNet."""

import random

import pytest

from tests.lab.data import Original, SmallImageNet, drawn, rotated


@pytest.fixture(scope="session")
def small_imagenet() -> SmallImageNet:
    """Return four classes, both cranes among them; a PNG, CMYK and gray images under JPEG names.

    One image lies on its side by its EXIF.
    """
    draw = random.Random(0)
    wnids = ["n01440764", "n02012849", "n02105855", "n03126707"]
    train = [
        Original(f"{wnid}_{number}", wnid, drawn(draw.random()))
        for wnid in wnids
        for number in range(7)
    ]
    train += [
        Original("n02105855_2933", "n02105855", drawn(draw.random(), format="PNG")),
        Original("n01440764_900", "n01440764", drawn(draw.random(), mode="CMYK")),
        Original("n01440764_901", "n01440764", drawn(draw.random(), mode="L")),
    ]
    train[0] = Original(train[0].stem, train[0].wnid, rotated("imagenet"))
    shown = [wnid for wnid in wnids for _ in range(3)]
    draw.shuffle(shown)
    val = [
        Original(f"ILSVRC2012_val_{number:08d}", wnid, drawn(draw.random()))
        for number, wnid in enumerate(shown, 1)
    ]
    return SmallImageNet(train, val)
