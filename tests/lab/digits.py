"""scikit-learn's 1,797 real digits as the four files in which MNIST is published."""

import gzip
import struct
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

TRAINED_ON, TESTED_ON = 1437, 360
SIDES = (28, 28)


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images, uint8 (1797, 28, 28), and labels, in a fixed random order."""
    from sklearn.datasets import load_digits

    result = load_digits()
    images = [Image.fromarray((image * 255 / 16).astype(np.uint8)) for image in result.images]
    larger = [np.asarray(image.resize(SIDES, Image.Resampling.BICUBIC)) for image in images]
    order = np.random.default_rng(0).permutation(len(larger))
    return np.stack(larger)[order], result.target[order].astype(np.uint8)


def files(train: int = TRAINED_ON, test: int = TESTED_ON) -> dict[str, bytes]:
    """Return names and contents of the four files."""
    images, labels = digits()
    names = {}
    for part, first, count in (("train", 0, train), ("t10k", TRAINED_ON, test)):
        rows = slice(first, first + count)
        heads = struct.pack(">4L", 2051, count, *SIDES), struct.pack(">2L", 2049, count)
        names[f"{part}-images-idx3-ubyte"] = heads[0] + images[rows].tobytes()
        names[f"{part}-labels-idx1-ubyte"] = heads[1] + labels[rows].tobytes()
    return names


def write(folder: Path, contents: dict[str, bytes], packed: bool = False) -> Path:
    """Write the files into a folder, as they are or gzipped."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        suffix = ".gz" if packed else ""
        (folder / f"{name}{suffix}").write_bytes(gzip.compress(data) if packed else data)
    return folder
