"""Drawn cats and dogs: something to train on where there is nothing to download.

Both kinds have the same coats, poses and places, so that colours do not tell them apart: ears,
eyes, muzzles, tails and legs do. Shapes are written like the points of an SVG path, in units of
the head's radius, with the head at the origin and y pointing down.
"""

from collections.abc import Iterator
from contextlib import contextmanager
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
PATTERNS = ("plain", "stripes", "patches", "spots", "saddle")
IRISES = ((156, 186, 84), (222, 176, 62), (110, 170, 200), (92, 58, 34), (126, 82, 44))
PAINTS = (
    *((222, 208, 186), (176, 196, 190), (198, 170, 160), (150, 164, 190), (120, 140, 120)),
    *((180, 70, 66), (70, 104, 150), (92, 130, 88), (212, 168, 84), (132, 92, 140), (70, 74, 84)),
)
SEASONS = (  # sky, ground, plants
    ((150, 192, 230), (112, 164, 78), (62, 120, 60)),
    ((188, 195, 198), (176, 142, 84), (196, 104, 44)),
    ((190, 204, 222), (226, 232, 240), (96, 116, 110)),
    ((170, 120, 120), (96, 104, 70), (58, 66, 58)),
    ((40, 48, 84), (40, 62, 54), (24, 44, 42)),
)

CAT_SKULL = "0,-.8 .4,-.79 .8,-.5 .98,-.05 .98,.3 .7,.66 .32,.82 0,.86"
CAT_EAR = "-.4,.1 -.28,-.42 .06,-1 .12,-.96 .34,-.4 .42,.25 0,.35"
CAT_EYE = "-.27,.06 -.12,-.18 .13,-.22 .29,-.1 .14,.16 -.1,.19"
CAT_NOSE = "-.13,.21 0,.19 .13,.21 .03,.34 -.03,.34"
CAT_TAILS = ("0,0 -.7,-.2 -.9,-1.1 -.7,-1.9 -1.1,-2.3", "0,0 -.8,.3 -1.5,0 -1.8,-.7 -1.5,-1")

DOG_SKULL = "0,-.85 .42,-.82 .72,-.48 .75,-.02 .64,.36 .48,.72 .28,.94 0,1"
DOG_EARS = (
    "-.16,-.06 .2,-.14 .5,.2 .64,.75 .5,1.12 .22,1.02 .1,.5",  # a beagle's
    "-.1,0 .22,-.1 .5,.3 .68,1 .62,1.5 .3,1.6 .06,1.3 .12,.6",  # a spaniel's
    "-.14,-.32 .32,-.4 .52,.1 .38,.42 .12,.1",  # a terrier's: the tip falls forward
    "-.36,.1 -.26,-.3 .02,-.74 .1,-.7 .26,-.3 .3,.2 0,.3",  # a husky's: upright as a cat's
)
DOG_SNOUT = "0,.05 .28,.14 .42,.45 .4,.7 .2,.79 0,.73"
DOG_NOSE = "0,.14 .17,.16 .25,.27 .14,.4 0,.44"
DOG_TAILS = ("0,0 -.5,-.3 -.8,-.9", "0,0 -.45,-.7 -.2,-1.25 .2,-1.2", "0,0 -.6,.2 -.95,.8")

SHOULDERS = "0,.2 .8,.8 1.35,1.8 1.5,3.4 0,3.6"
SEATED = "0,.3 .66,.8 .92,1.7 1.18,2.5 1.05,3.1 0,3.2"
CHEST = "0,.8 .46,1.15 .4,2 0,2.4"
BOXES = {  # what a pose fills: left, top, right, bottom
    "portrait": (-1.5, -1.5, 1.5, 1.7),
    "sitting": (-1.7, -1.6, 1.5, 3.3),
    "walking": (-4.4, -1.8, 1.5, 3.0),
}
POSES = ("portrait", "portrait", "portrait", "sitting", "sitting", "walking", "walking")


@cache
def points(text: str) -> Curve:
    """Return the points of "x,y x,y …"."""
    return np.array([pair.split(",") for pair in text.split()], dtype=np.float64)


def symmetric(text: str) -> Curve:
    """Return a closed outline from its right half, which starts on top and ends at the bottom."""
    half = points(text)
    return smooth(np.concatenate([half, half[-2:0:-1] * (-1, 1)]))


def smooth(corners: Curve) -> Curve:
    """Return the smooth closed curve through the corners (Catmull-Rom)."""
    before, start, end, after = (np.roll(corners, shift, axis=0) for shift in (1, 0, -1, -2))
    pieces = []
    for t in np.arange(6) / 6:
        bend = t * (end - before) + t**2 * (2 * before - 5 * start + 4 * end - after)
        pieces.append(start + (bend + t**3 * (3 * (start - end) + after - before)) / 2)
    return np.stack(pieces, axis=1).reshape(-1, 2)


def oval(x: float, y: float, rx: float, ry: float) -> Curve:
    """Return an ellipse."""
    angle = np.linspace(0, 2 * np.pi, 28, endpoint=False)
    return np.stack([x + rx * np.cos(angle), y + ry * np.sin(angle)], axis=1)


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

    image: Image.Image
    matrix: Curve

    def at(self, x: float, y: float, size: float = 1, tilt: float = 0, mirror: int = 1) -> "Pen":
        """Return a pen at (x, y) of this one, so much larger, tilted by degrees; -1: mirrored."""
        c, s = size * cos(radians(tilt)), size * sin(radians(tilt))
        step = np.array([[c * mirror, -s, x], [s * mirror, c, y], [0, 0, 1]])
        return replace(self, matrix=self.matrix @ step)

    def pixels(self, curve: Curve) -> list[float]:
        """Return a curve in pixels: x, y, x, y, …"""
        pixels = curve @ self.matrix[:, :2].T + self.matrix[:, 2]
        return [float(number) for number in pixels.ravel()]

    def fill(self, curve: Curve, colour: Colour) -> None:
        """Fill a closed curve."""
        ImageDraw.Draw(self.image).polygon(self.pixels(curve), fill=colour)

    def line(self, curve: Curve, width: float, colour: Colour) -> None:
        """Draw a line with round joints and ends."""
        pixels = self.pixels(curve)
        thick = max(1, round(width * abs(np.linalg.det(self.matrix[:, :2])) ** 0.5))
        brush = ImageDraw.Draw(self.image)
        brush.line(pixels, fill=colour, width=thick, joint="curve")
        for x, y in (pixels[:2], pixels[-2:]):
            brush.circle((x, y), thick / 2, fill=colour)

    @contextmanager
    def inside(self, outline: Curve) -> Iterator["Pen"]:
        """Give a pen that leaves no mark outside the outline."""
        layer, mask = self.image.copy(), Image.new("L", self.image.size)
        yield replace(self, image=layer)
        ImageDraw.Draw(mask).polygon(self.pixels(outline), fill=255)
        self.image.paste(layer, mask=mask)


@dataclass(frozen=True)
class Coat:
    """The fur of one animal."""

    base: Colour
    second: Colour  # of patches, stripes, spots and the saddle
    pale: Colour  # of muzzle, chest and paws
    pattern: str
    random: Random

    def part(self, pen: Pen, outline: Curve, colour: Colour = ()) -> None:
        """Fill a part of the animal with plain fur, darker at its edge."""
        middle = outline.mean(axis=0)
        pen.fill(outline, shade(colour or self.base, 0.7))
        pen.fill((outline - middle) * 0.95 + middle - (0.01, 0.02), colour or self.base)

    def patterned(self, pen: Pen, outline: Curve) -> None:
        """Fill a part of the animal with fur and its pattern."""
        self.part(pen, outline)
        (left, top), (right, bottom) = outline.min(axis=0), outline.max(axis=0)
        wide, high, random = right - left, bottom - top, self.random
        with pen.inside(outline) as inner:
            if self.pattern == "stripes":
                for x in np.linspace(left, right, random.randint(6, 9)):
                    band = [(x, top), (x * 0.9, top + high * random.uniform(0.3, 0.6))]
                    inner.line(np.array(band), wide * 0.05, self.second)
            elif self.pattern == "saddle":
                depth = high * random.uniform(0.15, 0.45)
                inner.fill(oval((left + right) / 2, top, wide * 0.6, depth), self.second)
            elif self.pattern != "plain":
                count, size = (3, 0.2) if self.pattern == "patches" else (14, 0.05)
                for _ in range(count):
                    x, y = random.uniform(left, right), random.uniform(top, bottom)
                    rx, ry = (wide * size * random.uniform(0.7, 1.3) for _ in "xy")
                    inner.fill(oval(x, y, rx, ry), self.second)


def cat_head(pen: Pen, coat: Coat, turn: float) -> None:
    """Draw pointed ears, large slanted eyes with slits, a little nose, whiskers."""
    random, wide = coat.random, coat.random.uniform(0.98, 1.14)
    iris = vary(random.choice(IRISES), random)
    for side in (-1, 1):
        ear = pen.at(side * 0.58 * wide, -0.55, tilt=side * random.uniform(0, 18), mirror=side)
        coat.part(ear, smooth(points(CAT_EAR)))
        ear.fill(smooth(points(CAT_EAR)) * 0.55 + (0.02, -0.08), shade(PINK, 0.9))
    coat.patterned(pen, symmetric(CAT_SKULL) * (wide, 1))
    face = pen.at(0.26 * turn, 0)
    for side in (-1, 1):
        face.fill(oval(side * 0.19, 0.45, 0.27, 0.23), coat.pale)
        eye = pen.at(side * 0.43 * wide + 0.2 * turn, -0.08, mirror=side)
        eye.fill(smooth(points(CAT_EYE)), INK)
        eye.fill(smooth(points(CAT_EYE)) * 0.8, iris)
        eye.fill(oval(0, 0, 0.08, 0.15), INK)
        eye.fill(oval(0.06, -0.09, 0.045, 0.045), WHITE)
    face.line(points("-.26,.46 -.12,.52 0,.43 .12,.52 .26,.46"), 0.045, shade(coat.pale, 0.5))
    face.fill(points(CAT_NOSE), random.choice((PINK, shade(PINK, 0.85), INK)))
    hair = WHITE if sum(coat.base) < 480 else shade(coat.base, 0.5)
    for side in (-1, 1) if random.random() < 0.6 else ():
        for drop in (0, 0.26, 0.52):
            face.line(np.array([(side * 0.3, 0.4), (side * 1.4, 0.2 + drop)]), 0.03, hair)


def dog_head(pen: Pen, coat: Coat, turn: float) -> None:
    """Draw ears that fall, round eyes, a long snout with a large nose, often a tongue."""
    random, wide = coat.random, coat.random.uniform(0.95, 1.2)
    (ear,) = random.choices(DOG_EARS, (2, 1, 2, 2))
    fur = random.choice((coat.second, coat.base, shade(coat.base, 0.75)))
    coat.patterned(pen, symmetric(DOG_SKULL) * (wide, 1))
    iris = vary(random.choice(IRISES), random)
    for side in (-1, 1):
        held = pen.at(side * 0.56 * wide, -0.62, tilt=side * random.uniform(-9, 9), mirror=side)
        coat.part(held, smooth(points(ear)), fur)
        eye = pen.at(side * 0.36 * wide + 0.2 * turn, -0.14)
        for colour, radius in ((INK, 0.18), (iris, 0.145), (INK, 0.085)):
            eye.fill(oval(0, 0, radius, radius), colour)
        eye.fill(oval(0.05, -0.05, 0.05, 0.05), WHITE)
    snout = pen.at(0.32 * turn, 0)
    if random.random() < 0.35:
        snout.fill(oval(0.05, 0.85, 0.17, random.uniform(0.25, 0.45)), PINK)
    coat.part(snout, symmetric(DOG_SNOUT) * (1.1, 1.1), shade(coat.pale, 0.85))
    snout.fill(symmetric(DOG_SNOUT), coat.pale)
    snout.line(points("-.36,.64 -.16,.74 0,.64 .16,.74 .36,.64"), 0.055, shade(coat.pale, 0.5))
    snout.line(points("0,.4 0,.64"), 0.05, shade(coat.pale, 0.5))
    snout.fill(symmetric(DOG_NOSE), random.choice((INK, shade(INK, 1.6))))


def animal(pen: Pen, kind: str, pose: str, random: Random) -> None:
    """Draw a whole animal, or its head and shoulders."""
    base, second = (vary(fur, random) for fur in random.sample(FURS, 2))
    pattern = random.choice(PATTERNS)
    if pattern == "stripes":
        second = shade(base, 0.55 if sum(base) > 300 else 1.6)
    pale = random.choice(((242, 238, 230), shade(base, 1.25)))
    coat, cat = Coat(base, second, pale, pattern, random), kind == "cat"
    tail = points(random.choice(CAT_TAILS if cat else DOG_TAILS))
    head, leg, girth = (cat_head, 1.1, 0.92) if cat else (dog_head, 1.4, 1.08)
    if pose == "portrait":
        coat.patterned(pen, symmetric(SHOULDERS) * (girth, 1))
        pen.fill(symmetric(CHEST), pale)
    elif pose == "sitting":
        pen.at(-0.9, 2.9).line(tail, 0.34, shade(base, 0.85))
        coat.patterned(pen, symmetric(SEATED) * (girth, 1))
        pen.fill(symmetric(CHEST), pale)
        for x in (-0.34, 0.34):
            pen.line(np.array([(x, 1.6), (x, 3.05)]), 0.44, shade(base, 0.9))
            pen.fill(oval(x, 3.16, 0.3, 0.18), pale)
    else:
        belly, stride = 0.42 + 1.25 * girth, random.uniform(0.1, 0.45)
        pen.at(-3.3, 0.67).line(tail, 0.34, shade(base, 0.85))
        for x, swing, light in ((-0.75, -1, 0.7), (-2.9, 1, 0.7), (-0.45, 1, 1), (-3.1, -1, 1)):
            foot = (x + swing * stride, belly + leg)
            pen.line(np.array([(x, belly - 0.4), foot]), 0.46, shade(base, light))
            pen.fill(oval(foot[0] + 0.1, foot[1] + 0.06, 0.29, 0.16), shade(pale, light))
        back = [(0.1, 0.1), (-0.7, 0.4), (-1.8, 0.52), (-2.9, 0.42), (-3.55, 0.77)]
        under = [(-3.6, belly - 0.3), (-2.7, belly - 0.1), (-1.6, belly), (-0.5, belly)]
        coat.patterned(pen, smooth(np.array([*back, *under, (0.15, 1.1)])))
    head(pen.at(0, 0, random.uniform(0.95, 1.2)), coat, random.uniform(-1, 1))


def background(pen: Pen, wide: float, random: Random) -> None:
    """Draw a room, a meadow, or a cloth, from (0, 0) to (wide, 1)."""
    paint, other = (vary(colour, random) for colour in random.sample(PAINTS, 2))
    horizon, scene = random.uniform(0.35, 0.85), random.choice(("room", "outdoors", "cloth"))
    if scene == "outdoors":
        sky, ground, plants = (vary(colour, random) for colour in random.choice(SEASONS))
        pen.fill(box(0, 0, wide, 1), sky)
        for _ in range(random.randint(1, 5)):
            x, size = random.uniform(0, wide), random.uniform(0.08, 0.25)
            pen.fill(oval(x, horizon - size / 2, size, size), vary(plants, random))
        pen.fill(box(0, horizon, wide, 1), ground)
        for _ in range(40):
            x, y = random.uniform(0, wide), random.uniform(horizon, 1)
            pen.line(np.array([(x, y), (x + 0.01, y - 0.05)]), 0.008, vary(ground, random))
        return
    pen.fill(box(0, 0, wide, 1), paint)
    pitch, tilt = random.uniform(0.08, 0.24), random.choice((0, 90, random.uniform(-45, 45)))
    woven = pen.at(wide / 2, 0.5, pitch, tilt)
    for row in range(-20, 20):
        if scene == "cloth":
            woven.fill(box(-20, row, 20, row + 0.5), other)
        elif row % 2:
            woven.fill(box(-20, row, 20, row + 0.1), shade(paint, 0.9))
    if scene == "room":
        pen.fill(box(0, horizon, wide, 1), other)
        for _ in range(random.randint(0, 3)):
            x, y, size = (random.uniform(*ends) for ends in ((0, wide), (0.1, horizon), (0.1, 0.4)))
            picture = box(x, y - size / 2, x + size, y + size / 2)
            pen.fill(picture, vary(random.choice(PAINTS), random))


def draw(kind: str, seed: int, number: int, pose: str = "") -> Image.Image:
    """Return one image of a "cat" or a "dog": RGB, each side 120 to 200 pixels."""
    random = Random(f"{kind} {seed} {number}")
    width, height = random.randint(*SIDES), random.randint(*SIDES)
    pose = pose or random.choice(POSES)
    image = Image.new("RGB", (width * FINENESS, height * FINENESS))
    canvas = Pen(image, np.eye(2, 3))
    background(canvas.at(0, 0, image.height), width / height, random)
    left, top, right, bottom = BOXES[pose]
    size = min(image.width / (right - left), image.height / (bottom - top))
    size *= random.uniform(0.6, 1.15)
    mirror = random.choice((-1, 1))
    x = (image.width - size * (right - left)) * random.uniform(0.1, 0.9)
    x += size * (right if mirror < 0 else -left)
    y = (image.height - size * (bottom - top)) * random.uniform(0.3, 1) - size * top
    animal(canvas.at(x, y, size, random.gauss(0, 6), mirror), kind, pose, random)
    for _ in range(random.randint(0, 2)):  # a ball or a cushion before it
        thing, (rx, ry) = canvas.at(x, y, size), (random.uniform(0.3, 0.8) for _ in "xy")
        ball = oval(random.uniform(-1.4, 1.4), random.uniform(-0.9, 1.6), rx, ry)
        thing.fill(ball, vary(random.choice(PAINTS), random))
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
