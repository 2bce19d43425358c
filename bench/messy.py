"""Write the messy folder of docs/howto/doctor.md: real digits with what a data set should not have.

    python -m bench.messy [FOLDER] [--wrong-percent 5]

scikit-learn's 1,797 digits, 28 x 28 pixels, 360 of them for validation; 5 % of all labels flipped,
3 % near copies added, 20 validation images copied into train.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from bench.images import jpeg
from rackrun.commandline.options import Positional
from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from tests.lab.data import TRAINED_ON, digits


@dataclass(frozen=True)
class Settings:
    """Write a messy folder of digits."""

    folder: Positional[Path] = Path("messy")
    """Folder to write."""
    wrong_percent: float = 5.0
    """Labels to flip, in percent."""


def main(args: Sequence[str]) -> None:
    """Write the folder."""
    settings = parse(Settings, "python -m bench.messy", args)
    write_messy(settings.folder, settings.wrong_percent)


def write_messy(folder: Path, wrong_percent: float = 5.0) -> None:
    """Write a messy folder of digits, the same one each time."""
    random = np.random.default_rng(0)
    images, true = digits()
    labels = true.astype(int)
    flipped = random.choice(len(labels), round(wrong_percent / 100 * len(labels)), replace=False)
    labels[flipped] = (labels[flipped] + random.integers(1, 10, len(flipped))) % 10

    def write(split: str, name: str, number: int, data: bytes) -> None:
        path = folder / split / str(labels[number]) / f"{name}{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    for number, pixels in enumerate(images):
        split = "train" if number < TRAINED_ON else "val"
        write(split, "digit", number, jpeg(Image.fromarray(pixels)))
    copied = random.choice(TRAINED_ON, round(0.03 * len(labels)), replace=False)
    for turn, number in enumerate(copied):
        changed = CHANGES[turn % len(CHANGES)](Image.fromarray(images[number]).convert("RGB"))
        write("train", "near", number, jpeg(changed, 85))
    for number in TRAINED_ON + random.choice(len(labels) - TRAINED_ON, 20, replace=False):
        write("train", "leak", number, jpeg(Image.fromarray(images[number])))


CHANGES: list[Callable[[Image.Image], Image.Image]] = [
    lambda image: Image.open(io.BytesIO(jpeg(image, 75))).convert("RGB"),
    lambda image: image.resize((21, 21), Image.Resampling.BICUBIC),
    lambda image: image.crop((0, 1, 27, 28)),
    ImageOps.mirror,
    lambda image: image.point(lambda value: int(0.6 * value)),
]
"""What near copies are made by, in turn."""

if __name__ == "__main__":
    run(main)
