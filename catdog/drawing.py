"""Drawn cats and dogs: something to train on where there is nothing to download.

Both kinds have the same coats and places, so that colours do not tell them apart: ears, eyes and
muzzles do. Shapes are written like the points of an SVG path, in units of the head's radius, with
the head at the origin and y pointing down.
"""

from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from math import cos, radians, sin
from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

Colour = tuple[int, ...]
Curve = NDArray[np.float64]  # (N, 2): x, y

KINDS = ("cat", "dog")
SIDES = (120, 200)  # pixels
FINENESS = 2  # drawn this much larger and then shrunk: smooth edges
QUALITY = 90

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

CAT_SKULL = "0,-.8 .4,-.79 .8,-.5 .98,-.05 .98,.3 .7,.66 .32,.82 0,.86"
CAT_EAR = "-.4,.1 -.28,-.42 .06,-1 .12,-.96 .34,-.4 .42,.25 0,.35"
CAT_EYE = "-.27,.06 -.12,-.18 .13,-.22 .29,-.1 .14,.16 -.1,.19"
CAT_NOSE = "-.13,.21 0,.19 .13,.21 .03,.34 -.03,.34"

DOG_SKULL = "0,-.85 .42,-.82 .72,-.48 .75,-.02 .64,.36 .48,.72 .28,.94 0,1"
DOG_EARS = (
    "-.16,-.06 .2,-.14 .5,.2 .64,.75 .5,1.12 .22,1.02 .1,.5",  # a beagle's
    "-.14,-.32 .32,-.4 .52,.1 .38,.42 .12,.1",  # a terrier's: the tip falls forward
    "-.36,.1 -.26,-.3 .02,-.74 .1,-.7 .26,-.3 .3,.2 0,.3",  # a husky's: upright as a cat's
)
DOG_SNOUT = "0,.05 .28,.14 .42,.45 .4,.7 .2,.79 0,.73"
DOG_NOSE = "0,.14 .17,.16 .25,.27 .14,.4 0,.44"

SHOULDERS = "0,.2 .8,.8 1.35,1.8 1.5,3.4 0,3.6"


def points(text: str) -> Curve:
    """Return the points of "x,y x,y …"."""
    return np.array([pair.split(",") for pair in text.split()], dtype=np.float64)


@cache
def outline(text: str) -> Curve:
    """Return the smooth closed curve through some corners (Catmull-Rom)."""
    return smooth(points(text))


@cache
def symmetric(text: str) -> Curve:
    """Return a closed outline from its right half, which starts on top and ends at the bottom."""
    half = points(text)
    return smooth(np.concatenate([half, half[-2:0:-1] * (-1, 1)]))


def smooth(corners: Curve) -> Curve:
    """Return six points of the curve for each corner."""
    before, start, end, after = (np.roll(corners, shift, axis=0) for shift in (1, 0, -1, -2))
    pieces = []
    for t in np.arange(6) / 6:
        bend = t * (end - before) + t**2 * (2 * before - 5 * start + 4 * end - after)
        pieces.append(start + (bend + t**3 * (3 * (start - end) + after - before)) / 2)
    return np.stack(pieces, axis=1).reshape(-1, 2)


@cache
def circle() -> Curve:
    """Return the unit circle."""
    angle = np.linspace(0, 2 * np.pi, 28, endpoint=False)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def oval(x: float, y: float, rx: float, ry: float) -> Curve:
    """Return an ellipse."""
    return circle() * (rx, ry) + (x, y)


def box(left: float, top: float, right: float, bottom: float) -> Curve:
    """Return a rectangle."""
    return np.array([(left, top), (right, top), (right, bottom), (left, bottom)])


def shade(colour: Colour, factor: float) -> Colour:
    """Return the colour darker (below 1) or lighter (above 1)."""
    lift = 12 if factor > 1 else 0  # black times anything stays black
    return tuple(min(255, round(part * factor + lift)) for part in colour)


def vary(colour: Colour, random: Random) -> Colour:
    """Return nearly the same colour."""
    light = random.uniform(-14, 14)
    return tuple(min(255, max(0, round(c + light + random.uniform(-7, 7)))) for c in colour)


@dataclass(frozen=True)
class Pen:
    """Draws on an image; `matrix` (2, 3) takes its coordinates to pixels."""

    brush: ImageDraw.ImageDraw
    matrix: Curve

    def at(self, x: float, y: float, size: float = 1, tilt: float = 0, mirror: int = 1) -> "Pen":
        """Return a pen at (x, y) of this one, so much larger, tilted by degrees; -1: mirrored."""
        c, s = size * cos(radians(tilt)), size * sin(radians(tilt))
        step = np.array([[c * mirror, -s, x], [s * mirror, c, y], [0, 0, 1]])
        return replace(self, matrix=self.matrix @ step)

    def fill(self, curve: Curve, colour: Colour) -> None:
        """Fill a closed curve."""
        self.brush.polygon(self._pixels(curve), fill=colour)

    def line(self, curve: Curve, width: float, colour: Colour) -> None:
        """Draw a line."""
        thick = max(1, round(width * abs(np.linalg.det(self.matrix[:, :2])) ** 0.5))
        self.brush.line(self._pixels(curve), fill=colour, width=thick, joint="curve")

    def fur(self, curve: Curve, colour: Colour) -> None:
        """Fill a closed curve with fur, darker at its edge."""
        middle = curve.mean(axis=0)
        self.fill(curve, shade(colour, 0.7))
        self.fill((curve - middle) * 0.95 + middle - (0.01, 0.02), colour)

    def _pixels(self, curve: Curve) -> list[float]:
        pixels: list[float] = (curve @ self.matrix[:, :2].T + self.matrix[:, 2]).ravel().tolist()
        return pixels


@dataclass(frozen=True)
class Coat:
    """The colours of one animal."""

    base: Colour
    second: Colour  # of stripes and spots
    pale: Colour  # of the muzzle
    iris: Colour
    pattern: str

    @classmethod
    def of(cls, random: Random) -> "Coat":
        """Return a coat that either kind may have."""
        base, second = (vary(fur, random) for fur in random.sample(FURS, 2))
        pale = random.choice(((242, 238, 230), shade(base, 1.25)))
        iris = vary(random.choice(IRISES), random)
        return cls(base, second, pale, iris, random.choice(("plain", "stripes", "spots")))

    def mark(self, pen: Pen, random: Random) -> None:
        """Draw the pattern of a forehead."""
        if self.pattern == "stripes":
            for x in (-0.4, -0.13, 0.13, 0.4):
                stripe = np.array([(x, -0.7), (x * 0.8, random.uniform(-0.45, -0.25))])
                pen.line(stripe, 0.08, self.second)
        elif self.pattern == "spots":
            for _ in range(5):
                x, y = random.uniform(-0.5, 0.5), random.uniform(-0.6, 0.4)
                rx, ry = random.uniform(0.06, 0.25), random.uniform(0.06, 0.2)
                pen.fill(oval(x, y, rx, ry), self.second)


def cat_head(pen: Pen, coat: Coat, turn: float, random: Random) -> None:
    """Draw pointed ears, large slanted eyes with slits, a little nose, whiskers."""
    wide = random.uniform(0.98, 1.14)
    for side in (-1, 1):
        ear = pen.at(side * 0.58 * wide, -0.55, tilt=side * random.uniform(0, 18), mirror=side)
        ear.fur(outline(CAT_EAR), coat.base)
        ear.fill(outline(CAT_EAR) * 0.55 + (0.02, -0.08), shade(PINK, 0.9))
    pen.fur(symmetric(CAT_SKULL) * (wide, 1), coat.base)
    coat.mark(pen, random)
    face = pen.at(0.26 * turn, 0)
    for side in (-1, 1):
        face.fill(oval(side * 0.19, 0.45, 0.27, 0.23), coat.pale)
        eye = pen.at(side * 0.43 * wide + 0.2 * turn, -0.08, mirror=side)
        eye.fill(outline(CAT_EYE), INK)
        eye.fill(outline(CAT_EYE) * 0.8, coat.iris)
        eye.fill(oval(0, 0, 0.08, 0.15), INK)
        eye.fill(oval(0.06, -0.09, 0.045, 0.045), WHITE)
    mouth = points("-.26,.46 -.12,.52 0,.43 .12,.52 .26,.46")
    face.line(mouth, 0.045, shade(coat.pale, 0.5))
    face.fill(points(CAT_NOSE), random.choice((PINK, shade(PINK, 0.85), INK)))
    hair = WHITE if sum(coat.base) < 480 else shade(coat.base, 0.5)
    for side in (-1, 1) if random.random() < 0.6 else ():
        for drop in (0, 0.26, 0.52):
            face.line(np.array([(side * 0.3, 0.4), (side * 1.4, 0.2 + drop)]), 0.03, hair)


def dog_head(pen: Pen, coat: Coat, turn: float, random: Random) -> None:
    """Draw ears that mostly fall, round eyes, a long snout with a large nose, often a tongue."""
    wide = random.uniform(0.95, 1.2)
    ear, fur = random.choice(DOG_EARS), random.choice((coat.second, shade(coat.base, 0.75)))
    pen.fur(symmetric(DOG_SKULL) * (wide, 1), coat.base)
    coat.mark(pen, random)
    for side in (-1, 1):
        held = pen.at(side * 0.56 * wide, -0.62, tilt=side * random.uniform(-9, 9), mirror=side)
        held.fur(outline(ear), fur)
        eye = pen.at(side * 0.36 * wide + 0.2 * turn, -0.14)
        for colour, radius in ((INK, 0.18), (coat.iris, 0.145), (INK, 0.085)):
            eye.fill(oval(0, 0, radius, radius), colour)
        eye.fill(oval(0.05, -0.05, 0.05, 0.05), WHITE)
    snout = pen.at(0.32 * turn, 0)
    if random.random() < 0.35:
        snout.fill(oval(0.05, 0.85, 0.17, random.uniform(0.25, 0.45)), PINK)
    snout.fur(symmetric(DOG_SNOUT) * 1.1, shade(coat.pale, 0.85))
    snout.fill(symmetric(DOG_SNOUT), coat.pale)
    mouth = points("-.36,.64 -.16,.74 0,.64 .16,.74 .36,.64")
    snout.line(mouth, 0.055, shade(coat.pale, 0.5))
    snout.fill(symmetric(DOG_NOSE), random.choice((INK, shade(INK, 1.6))))


def background(pen: Pen, wide: float, random: Random) -> None:
    """Draw a wall and a floor, with some things before them, from (0, 0) to (wide, 1)."""
    wall, floor = (vary(colour, random) for colour in random.sample(PAINTS, 2))
    horizon = random.uniform(0.35, 0.85)
    pen.fill(box(0, 0, wide, 1), wall)
    if random.random() < 0.5:
        pitch, tilt = random.uniform(0.08, 0.24), random.choice((0, 90, random.uniform(-45, 45)))
        woven = pen.at(wide / 2, 0.5, pitch, tilt)
        for row in range(-12, 12):
            woven.fill(box(-20, row, 20, row + random.choice((0.1, 0.5))), shade(wall, 0.9))
    pen.fill(box(0, horizon, wide, 1), floor)
    for _ in range(random.randint(0, 5)):
        x, y, size = random.uniform(0, wide), random.uniform(0, 1), random.uniform(0.04, 0.2)
        form = random.choice((oval(x, y, size, size), box(x, y, x + size, y + size)))
        pen.fill(form, vary(random.choice(PAINTS), random))


def draw(kind: str, seed: int, number: int) -> Image.Image:
    """Return one image of a "cat" or a "dog": RGB, each side 120 to 200 pixels."""
    random = Random(f"{kind} {seed} {number}")
    width, height = random.randint(*SIDES), random.randint(*SIDES)
    image = Image.new("RGB", (width * FINENESS, height * FINENESS))
    canvas = Pen(ImageDraw.Draw(image), np.eye(2, 3))
    background(canvas.at(0, 0, image.height), width / height, random)
    size = min(image.width, image.height) * random.uniform(0.18, 0.36)
    x, y = (side * random.uniform(0.3, 0.7) for side in image.size)
    pen = canvas.at(x, y, size, random.gauss(0, 8), random.choice((-1, 1)))
    coat, turn = Coat.of(random), random.uniform(-1, 1)
    pen.fur(symmetric(SHOULDERS) * (random.uniform(0.9, 1.1), 1), coat.base)
    head = cat_head if kind == "cat" else dog_head
    head(pen.at(0, 0, random.uniform(0.95, 1.2)), coat, turn, random)
    for _ in range(random.randint(0, 2)):  # a ball or a cushion before it
        rx, ry = random.uniform(0.3, 0.8), random.uniform(0.3, 0.8)
        ball = oval(random.uniform(-1.4, 1.4), random.uniform(-0.9, 1.6), rx, ry)
        pen.fill(ball, vary(random.choice(PAINTS), random))
    return photographed(image.resize((width, height), Image.Resampling.BOX), random)


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
