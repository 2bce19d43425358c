"""Images that benchmarks draw: JPEGs of 110 KB like photographs."""

import io
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rackrun.convert.folder import FolderOfClasses
from rackrun.convert.options import Packing

CLASSES = 10
COPIES = 8  # of each photograph, unlike by a comment only: drawing all would take too long
QUALITY, RESIZED_QUALITY = 92, 90


def write_shards(root: Path, images: int, **packing: Any) -> Path:
    """Draw photographs and pack them; return the folder of shards, beside that of the images."""
    FolderOfClasses(write_images(root, images), root / "shards", packing=Packing(**packing)).run()
    return root / "shards"


def write_images(root: Path, images: int, short_side: int = 0) -> Path:
    """Draw photographs into a folder for each class; return the folder above these."""
    sys.stderr.write("drawing images\n")
    drawn = photos(-(-images // COPIES), short_side)
    for number in range(images):
        path = root / "images" / f"class{number % CLASSES}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(commented(drawn[number % len(drawn)], f"{number:08d}"))
    return root / "images"


def photos(count: int, short_side: int = 0) -> list[bytes]:
    """Return that many photographs, drawn on all cores."""
    # Not a Pool: it ends its processes by SIGTERM, for which they inherit this program's handler.
    with ProcessPoolExecutor() as executor:
        return list(executor.map(partial(photo, short_side=short_side), range(count)))


def photo(seed: int, short_side: int = 0) -> bytes:
    """Return a JPEG of about 110 KB, 500 x 375 or 375 x 500, or resized to a shorter side.

    Decoding time depends on the detail, so it has the spectrum and the edges of a photograph.
    """
    draw = np.random.default_rng(seed)
    height, width = (375, 500) if seed % 4 else (500, 375)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1
    noise = np.fft.rfft2(draw.standard_normal((3, height, width)))
    falloff = frequency ** np.array([1.15, 1.5, 1.5])[:, None, None]
    planes = np.fft.irfft2(noise / falloff, s=(height, width))
    planes /= planes.std(axis=(1, 2), keepdims=True)
    down, across = np.mgrid[:height, :width]
    for _ in range(12):
        top, left, radius = draw.uniform((0, 0, 10), (height, width, 120))
        disc = np.hypot(down - top, across - left) < radius
        planes[:, disc] += draw.standard_normal((3, 1))
    tones = np.clip(128 + planes * np.array([48, 22, 22])[:, None, None], 0, 255)
    image = Image.fromarray(tones.astype(np.uint8).transpose(1, 2, 0), "YCbCr")
    if not short_side:
        return jpeg(image, QUALITY)
    width, height = (round(side * short_side / min(image.size)) for side in image.size)
    resized = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    return jpeg(resized, RESIZED_QUALITY)


def jpeg(image: Image.Image, quality: int = 90) -> bytes:
    """Return an image as JPEG."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def commented(data: bytes, text: str) -> bytes:
    """Return a JPEG with a comment, so that copies differ, as conversion demands."""
    return data[:2] + b"\xff\xfe" + (len(text) + 2).to_bytes(2, "big") + text.encode() + data[2:]
