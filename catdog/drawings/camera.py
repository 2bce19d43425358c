"""From a kind, a seed and a number to an image as a camera would have taken it.

place (small, out of focus) -> animal, things (twice as large, then shrunk) -> light -> grain
"""

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from random import Random

import numpy as np
from PIL import Image, ImageChops, ImageFilter

from catdog.drawings.bodies import KINDS, POSES
from catdog.drawings.coats import Coat
from catdog.drawings.looks import Look
from catdog.drawings.pen import LIGHT_CELL, LIT, Pen
from catdog.drawings.scenery import PLACES, clutter

FINENESS = 2  # the animal is drawn this much larger and then shrunk: smooth edges
SIDES = (120, 200)  # pixels
QUALITY = 90


def jpeg(kind: str, seed: int, number: int, poses: Sequence[str] = tuple(POSES)) -> bytes:
    """Return one image as a file: the same bytes for the same arguments."""
    file = BytesIO()
    draw(kind, seed, number, poses).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def draw(kind: str, seed: int, number: int, poses: Sequence[str] = tuple(POSES)) -> Image.Image:
    """Return one image of a "cat" or a "dog": RGB, each side 120 to 200 pixels."""
    random = Random(f"{kind} {seed} {number}")
    width, height = random.randint(*SIDES), random.randint(*SIDES)
    place = random.choice(list(PLACES))
    (pose,) = random.choices(poses, [POSES[pose].share for pose in poses])
    image = _background(place, width, height, random)
    light = _animal(image, kind, pose, random)
    clutter(place, Pen.on(image, size=image.height), width / height, random)
    return _taken(image.resize((width, height), Image.Resampling.BOX), light, random)


def _background(place: str, width: int, height: int, random: Random) -> Image.Image:
    """Draw a place, small and then enlarged: out of focus, more or less."""
    focus = random.uniform(0.45, 1.4)
    small = Image.new("RGB", (round(width * focus), round(height * focus)))
    PLACES[place](Pen.on(small, size=small.height), width / height, random)
    size = (width * FINENESS, height * FINENESS)
    return small.resize(size, Image.Resampling.BILINEAR)


def _animal(image: Image.Image, kind: str, pose: str, random: Random) -> Image.Image:
    """Draw one animal, mostly inside the image; the map (L) of its light and shadow."""
    box = POSES[pose].box
    high = box.bottom - box.top
    fit = min(image.width / box.width, image.height / high)
    size, mirror = fit * random.uniform(0.85, 1.15), random.random() < 0.5
    x = (image.width - size * box.width) * random.uniform(0.1, 0.9)
    x += size * (box.right if mirror else -box.left)
    y = (image.height - size * high) * random.uniform(0.3, 1) - size * box.top
    light = Image.new("L", (image.width // LIGHT_CELL, image.height // LIGHT_CELL), LIT)
    pen = replace(Pen.on(image, x, y, size), light=light)
    pen = pen.at(0, 0, tilt=random.gauss(0, 4), mirror=mirror)
    pen.shadow(box.middle, box.bottom - 0.05, box.width * 0.44, 0.35)
    POSES[pose].draw(pen, KINDS[kind], Coat.drawn(random), Look.drawn(random))
    return light.filter(ImageFilter.GaussianBlur(1))


def _taken(image: Image.Image, light: Image.Image, random: Random) -> Image.Image:
    """Return the image as a camera takes it: tinted, exposed, lit from a side, blurred, grainy."""
    image = image.point(_exposure(random))
    light = ImageChops.multiply(light, _daylight(light.size, random))
    light = light.resize(image.size, Image.Resampling.BICUBIC)
    image = ImageChops.multiply(image, Image.merge("RGB", (light, light, light)))
    blur = random.uniform(-0.6, 1.1)
    if blur > 0.2:
        image = image.filter(ImageFilter.GaussianBlur(blur))
    return _grainy(image, abs(random.gauss(0, 4)), random)


def _exposure(random: Random) -> list[int]:
    """Return, for each channel, the values that its 256 values become."""
    contrast, level = random.uniform(0.85, 1.15), random.uniform(0.82, 1.18)
    gains = np.array([[level * random.uniform(0.9, 1.1)] for _ in range(3)])
    values = ((np.arange(256) - 128) * contrast + 128) * gains
    table: list[int] = values.clip(0, 255).round().astype(int).ravel().tolist()
    return table


def _daylight(size: tuple[int, int], random: Random) -> Image.Image:
    """Return a map of light that comes from one side, more or less."""
    strength = random.uniform(0, 0.45)
    light = Image.linear_gradient("L").rotate(random.choice((0, 90, 180, 270))).resize(size)
    return light.point([round(255 - strength * (255 - value)) for value in range(256)])


def _grainy(image: Image.Image, strength: float, random: Random) -> Image.Image:
    """Return the noise of a sensor, `strength` levels of 256."""
    generator = np.random.default_rng(random.getrandbits(64))
    noise = generator.standard_normal((image.height, image.width, 1), dtype=np.float32)
    pixels = np.asarray(image) + noise * strength
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
