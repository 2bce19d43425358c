"""Small images, and the archives of cats and dogs that are in use."""

import io
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

ORIENTATION = 0x0112


def drawn(
    seed: object, size: tuple[int, int] = (48, 36), format: str = "JPEG", **save: Any
) -> bytes:
    """Return an image of a few shapes; `mode` and the arguments of Pillow's save may be given."""
    draw = random.Random(str(seed))
    image = Image.new("RGB", size, _colour(draw))
    for _ in range(6):
        x, y = draw.randrange(size[0]), draw.randrange(size[1])
        ImageDraw.Draw(image).ellipse((x, y, x + 14, y + 10), fill=_colour(draw))
    stored = io.BytesIO()
    image.convert(save.pop("mode", "RGB")).save(stored, format, **save)
    return stored.getvalue()


def textured(seed: int, size: tuple[int, int] = (300, 200), **save: Any) -> bytes:
    """Return a JPEG with details everywhere, as in photographs; options as for `drawn`."""
    grain = np.random.default_rng(seed).integers(256, size=(size[1] // 3, size[0] // 3, 3))
    image = Image.fromarray(grain.astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)
    stored = io.BytesIO()
    image.convert(save.pop("mode", "RGB")).save(stored, save.pop("format", "JPEG"), **save)
    return stored.getvalue()


def rotated(seed: object, orientation: int = 6) -> bytes:
    """Return a JPEG whose EXIF orientation turns it by 90 degrees."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return drawn(seed, exif=exif)


def kaggle(count: int) -> dict[str, bytes]:
    """Return names and images as in Kaggle's train.zip, `count` of each class."""
    return {
        f"train/{kind}.{number}.jpg": drawn(f"{kind} {number}")
        for kind in ("cat", "dog")
        for number in range(count)
    }


def write_zip(path: Path, files: dict[str, bytes], deflated: bool = False) -> Path:
    """Write a zip archive of these files."""
    how = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    """Write the same files into a folder."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def _colour(draw: random.Random) -> tuple[int, int, int]:
    return draw.randrange(256), draw.randrange(256), draw.randrange(256)
