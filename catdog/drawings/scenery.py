"""Places and the things in them: the same for both kinds of animals.

A place is drawn in units of the image's height: y from 0 to 1, x from 0 to `wide`.
"""

from collections.abc import Callable
from math import cos, pi, sin
from random import Random

from catdog.drawings.colours import WHITE, mix, shade, vary
from catdog.drawings.pen import Colour, Pen, path
from catdog.drawings.things import GARDEN, HOUSEHOLD, THINGS, butterfly, grass

WALLS: tuple[Colour, ...] = (
    (222, 208, 186),
    (176, 196, 190),
    (198, 170, 160),
    (150, 164, 190),
    (120, 140, 120),
    (226, 190, 120),
    (96, 88, 110),
    (190, 120, 110),
)
BRICK: Colour = (156, 82, 62)
FRAME: Colour = (240, 236, 226)
WOODS: tuple[Colour, ...] = ((164, 116, 72), (120, 84, 58), (196, 158, 110), (108, 100, 96))
CLOTHS: tuple[Colour, ...] = (
    (180, 70, 66),
    (70, 104, 150),
    (92, 130, 88),
    (212, 168, 84),
    (132, 92, 140),
    (226, 214, 200),
    (70, 74, 84),
)
# sky above, sky at the horizon, ground, plants
SEASONS: tuple[tuple[Colour, Colour, Colour, Colour], ...] = (
    ((96, 158, 220), (206, 228, 240), (112, 164, 78), (62, 120, 60)),  # summer
    ((150, 170, 190), (226, 220, 206), (176, 142, 84), (196, 104, 44)),  # autumn
    ((150, 172, 200), (230, 236, 244), (226, 232, 240), (96, 116, 110)),  # winter
    ((92, 70, 130), (246, 168, 112), (96, 104, 70), (58, 66, 58)),  # evening
    ((20, 26, 58), (58, 70, 110), (40, 62, 54), (24, 44, 42)),  # night
    ((110, 190, 226), (214, 236, 236), (228, 206, 156), (90, 150, 110)),  # beach
)


def room(pen: Pen, wide: float, random: Random) -> None:
    """Draw a wall and a floor, with something on or before the wall."""
    paint, floor = vary(random.choice(WALLS), 16, random), random.uniform(0.58, 0.85)
    pen.box(0, 0, wide, 1, paint)
    if random.random() < 0.4:
        _wallpaper(pen, wide, floor, shade(paint, random.choice((0.9, 1.08))), random)
    _floor(pen, wide, floor, random)
    for _ in range(random.randint(1, 2)):
        furniture = random.choice((_window, _painting, _shelf, _lamp, _plant, _sofa))
        furniture(pen.at(random.uniform(0, wide), floor), random)


def outdoors(pen: Pen, wide: float, random: Random) -> None:
    """Draw sky, hills, trees, and a meadow, snow or sand, in some season at some hour."""
    above, low, ground, plants = (vary(part, 12, random) for part in random.choice(SEASONS))
    horizon = random.uniform(0.3, 0.62)
    _sky(pen, wide, horizon, above, low, random)
    for far in (0.6, 0.3):
        _hills(pen, wide, horizon, mix(ground, low, far), random)
    pen.box(0, horizon, wide, 1, ground)
    for _ in range(random.randint(0, 3)):
        grown = random.choice((_fir, _tree, _fence))
        grown(pen.at(random.uniform(0, wide), horizon), plants, random)
    for _ in range(60):
        y = random.uniform(horizon, 1)
        blade = pen.at(random.uniform(0, wide), y, size=0.03 + 0.06 * (y - horizon))
        grass(blade, shade(ground, random.uniform(0.8, 1.15)), random)


def cloth(pen: Pen, wide: float, random: Random) -> None:
    """Draw a blanket or a rug that fills the image: checks, stripes or dots."""
    one, other = (vary(part, 12, random) for part in random.sample(CLOTHS, 2))
    other = mix(one, other, random.uniform(0.2, 0.9))
    pitch, weave = random.uniform(0.1, 0.24), random.choice(("checks", "stripes", "dots"))
    pen.box(0, 0, wide, 1, one)
    woven = pen.at(wide / 2, 0.5, pitch, tilt=random.uniform(-45, 45))
    reach = int(1.3 / pitch)
    for row in range(-reach, reach):
        if weave == "dots":
            for column in range(-reach, reach):
                woven.oval(column + row % 2 / 2, row, 0.2, 0.2, other)
        else:
            woven.box(-reach, row, reach, row + 0.5, other)
        if weave == "checks":
            woven.box(row, -reach, row + 0.2, reach, mix(one, other, 0.5))


def wall(pen: Pen, wide: float, random: Random) -> None:
    """Draw bricks, tiles or planks as a wall at the animal's back."""
    paint = vary(random.choice((*WALLS, BRICK)), 14, random)
    pen.box(0, 0, wide, 1, shade(paint, 0.75))
    height, length = random.choice(((0.08, 0.2), (0.12, 0.12), (1, 0.14), (0.14, 2)))
    joint = 0.008
    for row in range(int(1 / height) + 1):
        for column in range(-1, int(wide / length) + 1):
            x, y = (column + row % 2 / 2) * length, row * height
            pen.box(x, y, x + length - joint, y + height - joint, vary(paint, 9, random))
    if random.random() < 0.5:
        _floor(pen, wide, random.uniform(0.75, 0.9), random)


PLACES: dict[str, Callable[[Pen, float, Random], None]] = {
    "room": room,
    "outdoors": outdoors,
    "cloth": cloth,
    "wall": wall,
}


def clutter(place: str, pen: Pen, wide: float, random: Random) -> None:
    """Draw a few things around the animal and partly before it, and what flies or falls."""
    things = THINGS + (GARDEN if place == "outdoors" else HOUSEHOLD)
    for _ in range(random.choice((0, 0, 1, 1, 2, 3))):
        size = random.uniform(0.08, 0.15)
        spot = pen.at(random.uniform(0, wide), random.uniform(0.88, 1.04), size)
        random.choice(things)(spot, random)
    if place == "outdoors" and random.random() < 0.3:
        random.choice((_snow, _butterflies))(pen, wide, random)


def _wallpaper(pen: Pen, wide: float, floor: float, colour: Colour, random: Random) -> None:
    pitch, dotted = random.uniform(0.06, 0.16), random.random() < 0.5
    for column in range(int(wide / pitch) + 1):
        if dotted:
            for row in range(int(floor / pitch) + 1):
                x, y = (column + row % 2 / 2) * pitch, row * pitch
                pen.oval(x, y, pitch / 6, pitch / 6, colour)
        else:
            pen.box(column * pitch, 0, (column + 0.4) * pitch, floor, colour)


def _floor(pen: Pen, wide: float, level: float, random: Random) -> None:
    """Draw floorboards that run away from us, and a skirting board."""
    wood = vary(random.choice(WOODS), 14, random)
    pen.box(0, level, wide, 1, wood)
    pen.box(0, level - 0.03, wide, level, mix(wood, WHITE, 0.5))
    for number in range(-8, 9):
        joint = [(wide / 2 + number * 0.09, level), (wide / 2 + number * 0.16, 1)]
        pen.stroke(joint, 0.006, shade(wood, 0.8))


# Furniture and plants stand with the origin where the floor or the ground begins.


def _window(pen: Pen, random: Random) -> None:
    above, low, ground, _ = random.choice(SEASONS)
    pen.box(-0.22, -0.6, 0.22, -0.15, FRAME)
    pen.box(-0.2, -0.58, 0.2, -0.18, mix(above, low, 0.5))
    pen.box(-0.2, -0.28, 0.2, -0.18, ground)
    pen.box(-0.01, -0.58, 0.01, -0.18, FRAME)
    curtain = random.choice(CLOTHS)
    for left in (-0.26, 0.16):
        pen.box(left, -0.63, left + 0.1, -0.1, curtain)


def _painting(pen: Pen, random: Random) -> None:
    hung = pen.at(0, -random.uniform(0.3, 0.5), size=random.uniform(0.1, 0.18))
    hung.box(-1, -0.75, 1, 0.75, shade(random.choice(WOODS), 0.7))
    hung.box(-0.88, -0.63, 0.88, 0.63, random.choice(CLOTHS))
    hung.oval(0, 0, 0.5, 0.4, random.choice(CLOTHS))


def _shelf(pen: Pen, random: Random) -> None:
    hung = pen.at(-0.25, -random.uniform(0.25, 0.45))
    hung.box(0, 0, 0.5, 0.03, random.choice(WOODS))
    left = 0.0
    while left < 0.45:
        thick, tall = random.uniform(0.02, 0.05), random.uniform(0.09, 0.16)
        hung.box(left, -tall, left + thick, 0, vary(random.choice(CLOTHS), 20, random))
        left += thick + 0.004


def _lamp(pen: Pen, random: Random) -> None:
    pen.stroke([(0, 0.08), (0, -0.4)], 0.02, (70, 62, 60))
    pen.polygon(path("-.07,-.58 .07,-.58 .14,-.36 -.14,-.36"), (248, 226, 160))


def _plant(pen: Pen, random: Random) -> None:
    green = vary((78, 128, 80), 24, random)
    for number in range(9):
        angle = pi * (0.1 + 0.1 * number)
        tip = (-0.22 * cos(angle), -0.06 - 0.34 * sin(angle))
        leaf = [(0, -0.04), (tip[0] / 2, tip[1] * 0.6), tip]
        pen.limb(leaf, 0.05, 0.01, shade(green, 0.8 + 0.05 * number))
    pen.polygon(path("-.09,-.08 .09,-.08 .06,.1 -.06,.1"), (182, 104, 72))


def _sofa(pen: Pen, random: Random) -> None:
    fabric = vary(random.choice(CLOTHS), 12, random)
    pen.box(-0.5, -0.28, 0.5, 0.12, shade(fabric, 0.85))
    pen.box(-0.5, -0.06, 0.5, 0.12, fabric)
    for left in (-0.6, 0.45):
        pen.box(left, -0.16, left + 0.15, 0.12, shade(fabric, 0.95))


def _sky(pen: Pen, wide: float, horizon: float, above: Colour, low: Colour, random: Random) -> None:
    """Draw the sky from one colour to the other in steps, with sun or moon, and clouds."""
    steps = 9
    for step in range(steps):
        colour = mix(above, low, step / (steps - 1))
        pen.box(0, horizon * step / steps, wide, horizon + 0.02, colour)
    if random.random() < 0.5:
        size = random.uniform(0.05, 0.1)
        pen.oval(random.uniform(0, wide), random.uniform(0.08, 0.25), size, size, (250, 240, 204))
    for _ in range(random.randint(0, 3)):
        cloud = pen.at(random.uniform(0, wide), random.uniform(0.05, horizon * 0.7))
        for x in (-0.1, -0.03, 0.05, 0.12):
            size = random.uniform(0.06, 0.1)
            cloud.oval(x, -random.uniform(0, 0.03), size, size / 2, mix(low, WHITE, 0.7))


def _hills(pen: Pen, wide: float, horizon: float, colour: Colour, random: Random) -> None:
    tops = [(wide * step / 5, horizon - random.uniform(0.01, 0.14)) for step in range(-1, 7)]
    pen.shape([(-0.5, horizon + 0.2), *tops, (wide + 0.5, horizon + 0.2)], colour)


def _fir(pen: Pen, colour: Colour, random: Random) -> None:
    tree = pen.at(0, 0.04, size=random.uniform(0.2, 0.42))
    for step in range(3):
        level, half = -0.1 - 0.27 * step, 0.3 - 0.07 * step
        branch = [(-half, level), (half, level), (0, level - 0.42)]
        tree.polygon(branch, shade(colour, 0.85 + 0.1 * step))


def _tree(pen: Pen, colour: Colour, random: Random) -> None:
    pen.limb([(0, 0.05), (0.01, -0.2)], 0.05, 0.035, (96, 70, 52))
    for _ in range(5):
        x, y, size = random.uniform(-0.1, 0.1), random.uniform(-0.36, -0.2), 0.1
        pen.oval(x, y, size, size, vary(colour, 16, random))


def _fence(pen: Pen, colour: Colour, random: Random) -> None:
    wood = vary((198, 180, 152), 20, random)
    for number in range(7):
        picket = path("0,.06 0,-.1 .03,-.14 .06,-.1 .06,.06") + (number * 0.1 - 0.35, 0)
        pen.polygon(picket, wood)
    pen.box(-0.38, -0.04, 0.35, -0.01, shade(wood, 0.85))


def _snow(pen: Pen, wide: float, random: Random) -> None:
    for _ in range(40):
        size = random.uniform(0.004, 0.012)
        pen.oval(random.uniform(0, wide), random.random(), size, size, WHITE)


def _butterflies(pen: Pen, wide: float, random: Random) -> None:
    for _ in range(2):
        butterfly(pen.at(random.uniform(0, wide), random.uniform(0.1, 0.5), 0.05), random)
