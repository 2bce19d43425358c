"""Things that lie about: each stands on the origin and is about 1 in size."""

from collections.abc import Callable
from math import cos, pi, sin
from random import Random

from catdog.drawings.colours import INK, PINK, WHITE, shade, vary
from catdog.drawings.pen import Colour, Pen, path

WOOLS: tuple[Colour, ...] = ((180, 70, 66), (70, 104, 150), (92, 130, 88), (212, 168, 84))
BALLS: tuple[Colour, ...] = ((206, 216, 70), (210, 70, 66), (70, 120, 200), (240, 150, 60))
PETALS: tuple[Colour, ...] = ((240, 220, 90), (226, 110, 130), (246, 244, 240), (150, 120, 210))
LEAVES: tuple[Colour, ...] = ((206, 120, 46), (190, 70, 50), (220, 178, 70))
WINGS: tuple[Colour, ...] = ((240, 170, 60), (120, 150, 220), (240, 236, 220), (220, 110, 120))
BONE: Colour = (238, 228, 204)


def ball(pen: Pen, random: Random) -> None:
    """Draw a tennis ball, or one of another colour."""
    colour = random.choice(BALLS)
    pen.oval(0, -0.6, 0.6, 0.6, shade(colour, 0.8))
    pen.oval(-0.04, -0.64, 0.53, 0.53, colour)
    pen.stroke(path("-.5,-.8 0,-.5 .52,-.8"), 0.08, WHITE)


def yarn(pen: Pen, random: Random) -> None:
    """Draw a ball of wool and its loose end."""
    colour = vary(random.choice(WOOLS), 16, random)
    pen.stroke(path(".3,-.1 .9,.05 1.3,-.1 1.8,.05"), 0.07, colour)
    pen.oval(0, -0.6, 0.65, 0.62, colour)
    for tilt in (20, 80, 140):
        wound = pen.at(0, -0.6, tilt=tilt)
        for y in (-0.3, 0, 0.3):
            wound.stroke([(-0.5, y), (0, y + 0.12), (0.5, y)], 0.05, shade(colour, 0.75))


def bone(pen: Pen, random: Random) -> None:
    """Draw a bone."""
    held = pen.at(0, -0.25, tilt=random.uniform(-30, 30))
    for x in (-0.7, 0.7):
        for y in (-0.14, 0.14):
            held.oval(x, y, 0.2, 0.19, BONE)
    held.box(-0.7, -0.14, 0.7, 0.14, BONE)


def bowl(pen: Pen, random: Random) -> None:
    """Draw a full bowl."""
    pen.oval(0, -0.55, 0.66, 0.2, (126, 86, 60))
    pen.polygon(path("-.7,-.55 .7,-.55 .9,0 -.9,0"), vary(random.choice(WOOLS), 16, random))


def mouse(pen: Pen, random: Random) -> None:
    """Draw a toy mouse."""
    pen.stroke(path("-.6,-.15 -1,-.3 -1.3,-.05"), 0.06, PINK)
    pen.oval(0, -0.25, 0.62, 0.3, vary((150, 148, 152), 20, random))
    pen.oval(0.3, -0.48, 0.17, 0.17, PINK)
    pen.oval(0.48, -0.26, 0.05, 0.05, INK)


def flower(pen: Pen, random: Random) -> None:
    """Draw five petals on a stalk."""
    bend, colour = random.uniform(-0.3, 0.3), random.choice(PETALS)
    pen.stroke([(0, 0.2), (bend / 2, -0.5), (bend, -1.1)], 0.09, (76, 130, 70))
    for number in range(5):
        angle = 2 * pi * number / 5
        pen.oval(bend + 0.26 * cos(angle), -1.1 + 0.26 * sin(angle), 0.2, 0.2, colour)
    pen.oval(bend, -1.1, 0.16, 0.16, (232, 168, 60))


def tuft(pen: Pen, random: Random) -> None:
    """Draw long grass."""
    green = vary((92, 144, 70), 24, random)
    for _ in range(9):
        blade = pen.at(random.uniform(-0.6, 0.6), 0.3, size=random.uniform(0.9, 1.8))
        grass(blade, shade(green, random.uniform(0.8, 1.1)), random)


def grass(pen: Pen, colour: Colour, random: Random) -> None:
    """Draw one blade."""
    pen.polygon([(-0.17, 0), (0.17, 0), (random.uniform(-0.5, 0.5), -1)], colour)


def leaf(pen: Pen, random: Random) -> None:
    """Draw a leaf that falls or has fallen."""
    colour = vary(random.choice(LEAVES), 16, random)
    held = pen.at(0, -random.uniform(0, 4), tilt=random.uniform(0, 360))
    held.shape(path("-.5,0 -.1,-.26 .5,0 -.1,.26"), colour)
    held.stroke(path("-.6,0 .4,0"), 0.05, shade(colour, 0.75))


def butterfly(pen: Pen, random: Random) -> None:
    """Draw a butterfly."""
    colour = random.choice(WINGS)
    for side in (-1, 1):
        pen.oval(side * 0.5, -0.3, 0.45, 0.4, colour)
        pen.oval(side * 0.4, 0.3, 0.3, 0.28, shade(colour, 0.85))
    pen.oval(0, 0, 0.1, 0.6, INK)


Thing = Callable[[Pen, Random], None]
THINGS: tuple[Thing, ...] = (ball, bone, bowl)
HOUSEHOLD: tuple[Thing, ...] = (yarn, mouse)
GARDEN: tuple[Thing, ...] = (flower, tuft, leaf)
