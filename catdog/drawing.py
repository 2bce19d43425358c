"""Drawn cats and dogs: something to train on where there is nothing to download.

Both kinds have the same coats and places, so that colors do not tell them apart: ears, eyes and
muzzles do. A head is drawn on a square of its own, in units of its radius with the origin in the
middle, and then pasted tilted, in some size, on a background.
"""

from collections.abc import Sequence
from io import BytesIO
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

Color = tuple[int, ...]
Point = tuple[float, float]

KINDS = ("cat", "dog")
SIDES = (120, 200)  # pixels
QUALITY = 90
TILE = 320  # pixels: a head is drawn finely and then shrunk
RADIUS = TILE / 3.2

INK, PINK, WHITE = (38, 32, 34), (226, 148, 150), (255, 255, 255)
FURS = (
    *((226, 141, 62), (238, 214, 176), (58, 54, 58), (138, 140, 146), (129, 88, 56)),
    *((82, 55, 40), (240, 238, 232), (203, 166, 114), (100, 110, 126), (176, 100, 52)),
)
IRISES = ((156, 186, 84), (222, 176, 62), (110, 170, 200), (92, 58, 34), (126, 82, 44))
PAINTS = (
    *((222, 208, 186), (176, 196, 190), (198, 170, 160), (150, 164, 190), (120, 140, 120)),
    *((180, 70, 66), (70, 104, 150), (92, 130, 88), (212, 168, 84), (132, 92, 140), (70, 74, 84)),
)
DOG_EARS = (
    ((0.35, -0.75), (0.85, -0.7), (1.2, 0.1), (0.95, 0.6), (0.7, 0.2)),  # hangs
    ((0.3, -0.8), (0.9, -0.85), (1.15, -0.4), (0.75, -0.3)),  # the tip falls forward
    ((0.2, -0.7), (0.5, -1.3), (0.85, -0.4)),  # upright as a cat's
)


class Head:
    """A head on a transparent square; shapes are mirrored by `side`, -1 or 1."""

    def __init__(self) -> None:
        self.image = Image.new("RGBA", (TILE, TILE))
        self._brush = ImageDraw.Draw(self.image)

    def oval(self, center: Point, across: float, down: float, color: Color, side: int = 1) -> None:
        """Draw an ellipse with these radii."""
        x, y = center[0] * side, center[1]
        self._brush.ellipse(_pixels([(x - across, y - down), (x + across, y + down)]), color)

    def shape(self, corners: Sequence[Point], color: Color, side: int = 1) -> None:
        """Draw a polygon."""
        self._brush.polygon(_pixels([(x * side, y) for x, y in corners]), color)

    def line(self, corners: Sequence[Point], color: Color, side: int = 1) -> None:
        """Draw a thin line."""
        self._brush.line(_pixels([(x * side, y) for x, y in corners]), color, TILE // 70)


def _pixels(points: Sequence[Point]) -> list[float]:
    return [TILE / 2 + each * RADIUS for point in points for each in point]


def shade(color: Color, factor: float) -> Color:
    """Return the color darker (below 1) or lighter (above 1)."""
    return tuple(min(255, round(part * factor)) for part in color)


def vary(color: Color, random: Random) -> Color:
    """Return nearly the same color."""
    light = random.uniform(-14, 14)
    return tuple(min(255, max(0, round(c + light + random.uniform(-7, 7)))) for c in color)


def cat_head(head: Head, fur: Color, other: Color, pale: Color, random: Random) -> None:
    """Draw pointed ears, large eyes with slits, a little nose, whiskers."""
    iris, reach = vary(random.choice(IRISES), random), random.uniform(1.15, 1.45)
    for side in (-1, 1):
        head.shape([(0.2, -0.7), (0.75, -reach), (0.95, -0.2)], shade(fur, 0.8), side)
        head.shape([(0.4, -0.7), (0.7, 0.12 - reach), (0.8, -0.4)], shade(PINK, 0.9), side)
    head.oval((0, 0), 1, 0.85, fur)
    marked(head, other, random)
    for side in (-1, 1):
        head.oval((0.2, 0.42), 0.28, 0.24, pale, side)
        head.oval((0.42, -0.1), 0.28, 0.2, INK, side)
        head.oval((0.42, -0.1), 0.23, 0.16, iris, side)
        head.oval((0.42, -0.1), 0.07, 0.16, INK, side)
        head.line([(0, 0.34), (0, 0.45), (0.2, 0.52)], shade(pale, 0.5), side)
        for drop in (0, 0.2, 0.4):
            head.line([(0.35, 0.4), (1.35, 0.2 + drop)], WHITE if sum(fur) < 480 else INK, side)
    head.shape([(-0.13, 0.22), (0.13, 0.22), (0, 0.36)], random.choice((PINK, INK)))


def dog_head(head: Head, fur: Color, other: Color, pale: Color, random: Random) -> None:
    """Draw ears that mostly fall, round eyes, a long snout with a large nose, often a tongue."""
    iris, ears = vary(random.choice(IRISES), random), random.choice(DOG_EARS)
    ear = random.choice((other, shade(fur, 0.75)))
    head.oval((0, -0.1), 0.85, 0.8, fur)
    head.oval((0, 0.4), 0.6, 0.65, fur)
    marked(head, other, random)
    if random.random() < 0.35:
        head.oval((0.05, 0.95), 0.17, random.uniform(0.2, 0.4), PINK)
    head.oval((0, 0.5), 0.45, 0.45, pale)
    for side in (-1, 1):
        head.shape(ears, ear, side)
        head.oval((0.36, -0.16), 0.18, 0.18, INK, side)
        head.oval((0.36, -0.16), 0.14, 0.14, iris, side)
        head.oval((0.36, -0.16), 0.08, 0.08, INK, side)
        head.line([(0, 0.45), (0, 0.68), (0.3, 0.74)], shade(pale, 0.5), side)
    head.oval((0, 0.3), 0.24, 0.16, INK)


def marked(head: Head, color: Color, random: Random) -> None:
    """Draw stripes or spots on a forehead, or nothing."""
    pattern = random.choice(("plain", "stripes", "spots"))
    for x in (-0.4, -0.13, 0.13, 0.4) if pattern == "stripes" else ():
        head.shape([(x - 0.04, -0.7), (x + 0.04, -0.7), (x * 0.8, -0.3)], color)
    for _ in range(5 if pattern == "spots" else 0):
        center = random.uniform(-0.5, 0.5), random.uniform(-0.6, 0.4)
        head.oval(center, random.uniform(0.06, 0.25), random.uniform(0.06, 0.2), color)


def background(width: int, height: int, random: Random) -> Image.Image:
    """Return a wall and a floor with some things before them."""
    image = Image.new("RGB", (width, height), vary(random.choice(PAINTS), random))
    brush = ImageDraw.Draw(image)
    floor = round(height * random.uniform(0.35, 0.85))
    brush.rectangle((0, floor, width, height), vary(random.choice(PAINTS), random))
    for _ in range(random.randint(0, 6)):
        draw_form = random.choice((brush.ellipse, brush.rectangle))
        x, y, size = random.randrange(width), random.randrange(height), random.randint(8, 40)
        draw_form((x, y, x + size, y + size), vary(random.choice(PAINTS), random))
    return image


def draw(kind: str, seed: int, number: int) -> Image.Image:
    """Return one image of a "cat" or a "dog": RGB, each side 120 to 200 pixels."""
    random = Random(f"{kind} {seed} {number}")
    image = background(random.randint(*SIDES), random.randint(*SIDES), random)
    fur, other = (vary(each, random) for each in random.sample(FURS, 2))
    pale, head = random.choice(((242, 238, 230), shade(fur, 1.25))), Head()
    (cat_head if kind == "cat" else dog_head)(head, fur, other, pale, random)
    side = round(min(image.size) * random.uniform(0.55, 1.15))
    size = side, round(side * random.uniform(0.85, 1.15))
    tile = head.image.resize(size, Image.Resampling.BOX)
    tile = tile.rotate(random.gauss(0, 8), Image.Resampling.BILINEAR)
    x, y = (
        random.uniform(0.3, 0.7) * whole - part / 2
        for whole, part in zip(image.size, tile.size, strict=True)
    )
    image.paste(tile, (round(x), round(y)), tile)
    return photographed(image, random)


def photographed(image: Image.Image, random: Random) -> Image.Image:
    """Return the image as a camera takes it: exposed, tinted, lit from a side, blurred, grainy."""
    noise = np.random.default_rng(random.getrandbits(64))
    image = image.filter(ImageFilter.GaussianBlur(max(random.uniform(-0.6, 1.1), 0)))
    pixels = (np.asarray(image, np.float32) - 128) * random.uniform(0.85, 1.15) + 128
    exposure = random.uniform(0.82, 1.18)
    pixels *= [exposure * random.uniform(0.9, 1.1) for _ in range(3)]
    light = np.linspace(1, 1 - random.uniform(0, 0.45), image.width)[:: random.choice((-1, 1))]
    pixels *= light[:, None]
    pixels += noise.standard_normal((image.height, image.width, 1)) * random.gauss(0, 4)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def jpeg(kind: str, seed: int, number: int) -> bytes:
    """Return one image as a file: the same bytes for the same arguments."""
    file = BytesIO()
    draw(kind, seed, number).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()
