"""Whole animals: a head on a body that sits, walks or lies, or only looks into the image.

Everything is in units of the head's radius, with the head at the origin.
"""

from collections.abc import Callable
from dataclasses import dataclass

from catdog.drawings import cats, dogs
from catdog.drawings.coats import Area, Coat
from catdog.drawings.colours import shade
from catdog.drawings.looks import Look
from catdog.drawings.pen import Colour, Pen, both_sides, closed, path

COLLARS: tuple[Colour, ...] = (
    (196, 54, 58),
    (52, 104, 186),
    (64, 150, 92),
    (222, 174, 52),
    (140, 80, 160),
)
SHOULDERS = "0,.2 .8,.8 1.35,1.8 1.5,3.4 0,3.6"
CHEST = "0,.8 .46,1.15 .4,2 0,2.4"
SEATED = "0,.3 .66,.8 .92,1.7 1.18,2.5 1.05,3.1 0,3.2"
HAUNCH = ".62,2.2 1.16,2.3 1.24,3 .75,3.2"
RECLINED = ".2,.2 -.9,-.05 -2.2,-.05 -3.1,.5 -3.3,1.2 -2.7,1.6 -1,1.65 .6,1.6 .9,1.2"
THIGH = "-2.9,.7 -2.2,.45 -1.6,.9 -1.7,1.6 -2.8,1.6"


@dataclass(frozen=True)
class Kind:
    """Proportions that the bodies of one kind share."""

    front: Callable[[Pen, Coat, Look], None]
    profile: Callable[[Pen, Coat, Look], None]
    tails: tuple[str, ...]  # curves that start at the rump
    tail_start: float  # thickness at the rump
    tail_end: float
    leg: float  # length
    girth: float


KINDS = {
    "cat": Kind(
        cats.front,
        cats.profile,
        tails=(
            "0,0 -.7,-.2 -.9,-1.1 -.7,-1.9 -1.1,-2.3",
            "0,0 -.8,.3 -1.5,0 -1.8,-.7 -1.5,-1",
            "0,0 -.3,-.9 -.5,-1.8 -.1,-2.4",
        ),
        tail_start=0.36,
        tail_end=0.26,
        leg=1.1,
        girth=0.92,
    ),
    "dog": Kind(
        dogs.front,
        dogs.profile,
        tails=("0,0 -.5,-.3 -.8,-.9", "0,0 -.45,-.7 -.2,-1.25 .2,-1.2", "0,0 -.6,.2 -.95,.8"),
        tail_start=0.42,
        tail_end=0.2,
        leg=1.4,
        girth=1.08,
    ),
}


def portrait(pen: Pen, kind: Kind, coat: Coat, look: Look) -> None:
    """Draw head and shoulders."""
    body = closed(both_sides(path(SHOULDERS))) * (kind.girth, 1)
    coat.patterned(pen, body, Area(-1.4, 0.6, 1.4, 3))
    pen.shape(both_sides(path(CHEST)), coat.pale)
    _collar(pen.at(0, 0.98, size=1.2), coat)
    kind.front(pen, coat, look)


def sitting(pen: Pen, kind: Kind, coat: Coat, look: Look) -> None:
    """Draw the animal upright, seen from the front."""
    _tail(pen.at(-0.9, 2.9), kind, coat)
    body = closed(both_sides(path(SEATED))) * (kind.girth, 1)
    coat.patterned(pen, body, Area(-1.1, 0.6, 1.1, 3.1))
    pen.shape(both_sides(path(CHEST)), coat.pale)
    for side in (False, True):
        half = pen.at(0, 0, mirror=side)
        coat.part(half, closed(path(HAUNCH)))
        half.oval(0.98, 3.16, 0.42, 0.17, coat.pale)
        half.limb(path(".32,1.5 .34,2.3 .33,3.05"), 0.5, 0.4, shade(coat.base, 0.9))
        _paw(half.at(0.34, 3.16), coat)
    _collar(pen.at(0, 0.96), coat)
    kind.front(pen.at(0, 0, look.young), coat, look)


def walking(pen: Pen, kind: Kind, coat: Coat, look: Look) -> None:
    """Draw the animal on four legs, going right; the head looks ahead or at us."""
    belly = 0.42 + 1.25 * kind.girth
    stride = coat.random.uniform(0.1, 0.45)
    _tail(pen.at(-3.3, 0.67), kind, coat)
    _leg(pen.at(-0.75, belly), kind, coat, -stride, shade(coat.base, 0.7))
    _leg(pen.at(-2.9, belly), kind, coat, stride, shade(coat.base, 0.7))
    _leg(pen.at(-0.45, belly), kind, coat, stride, coat.base)
    _leg(pen.at(-3.1, belly), kind, coat, -stride, coat.base)
    back = [(0.1, 0.1), (-0.7, 0.4), (-1.8, 0.52), (-2.9, 0.42), (-3.55, 0.77)]
    under = [(-3.6, belly - 0.3), (-2.7, belly - 0.12), (-1.6, belly), (-0.5, belly), (0.15, 1.1)]
    coat.patterned(pen, closed(back + under), Area(-3.6, 0.32, 0.1, belly))
    _collar(pen.at(0, 0.7, size=0.85), coat)
    head = kind.profile if coat.random.random() < 0.55 else kind.front
    head(pen.at(0.1, -0.25, look.young), coat, look)


def lying(pen: Pen, kind: Kind, coat: Coat, look: Look) -> None:
    """Draw the animal at ease, the paws in front."""
    body = closed(path(RECLINED)) * (1, kind.girth)
    coat.patterned(pen, body, Area(-3.2, -0.1, 0.8, 1.6))
    coat.part(pen, closed(path(THIGH)), shade(coat.base, 0.94))
    _tail(pen.at(-3, 1.35), kind, coat)
    reach = kind.leg - 0.5
    for x in (-0.5, 0.3):
        pen.limb([(x - 0.3, 1.35), (x + reach, 1.5)], 0.44, 0.36, shade(coat.base, 0.92))
        _paw(pen.at(x + reach + 0.08, 1.5), coat)
    _collar(pen.at(0, 0.85), coat)
    kind.front(pen.at(0, 0, look.young), coat, look)


def _tail(pen: Pen, kind: Kind, coat: Coat) -> None:
    """Draw a tail, from the rump at the origin."""
    curve, bushy = path(coat.random.choice(kind.tails)), 4 * coat.hair
    pen.limb(curve, kind.tail_start + bushy, kind.tail_end + bushy, coat.extremities)
    if coat.pattern == "stripes":
        pen.limb(curve[-2:], kind.tail_end + bushy, kind.tail_end + bushy, coat.second)


def _leg(pen: Pen, kind: Kind, coat: Coat, swing: float, fur: Colour) -> None:
    """Draw a leg, from the belly at the origin to the ground."""
    knee = (swing * 0.3 - 0.05, kind.leg * 0.4)
    pen.limb([(0, -0.5), knee, (swing, kind.leg)], 0.62, 0.34, fur)
    pale = coat.pale if fur == coat.base else shade(coat.pale, 0.75)
    pen.oval(swing + 0.1, kind.leg + 0.06, 0.29, 0.16, pale)


def _paw(pen: Pen, coat: Coat) -> None:
    """Draw a paw from the front, with toes."""
    pen.oval(0, 0, 0.3, 0.18, coat.pale)
    for x in (-0.1, 0.1):
        pen.stroke([(x, 0), (x, 0.14)], 0.03, shade(coat.pale, 0.6))


def _collar(pen: Pen, coat: Coat) -> None:
    """Draw a collar with a tag, on every third animal."""
    if coat.random.random() < 0.34:
        band = path("-.6,-.14 -.3,.03 0,.08 .3,.03 .6,-.14")
        pen.stroke(band, 0.17, coat.random.choice(COLLARS))
        pen.oval(0, 0.22, 0.13, 0.14, (228, 190, 84))
        pen.oval(-0.03, 0.19, 0.05, 0.05, (250, 230, 160))


@dataclass(frozen=True)
class Pose:
    """A pose: its drawing, the box that it fills, and its frequency."""

    draw: Callable[[Pen, Kind, Coat, Look], None]
    box: Area
    share: int


POSES = {
    "portrait": Pose(portrait, Area(-1.5, -1.5, 1.5, 1.7), share=3),
    "sitting": Pose(sitting, Area(-1.7, -1.6, 1.5, 3.3), share=2),
    "walking": Pose(walking, Area(-4.4, -1.8, 1.5, 3), share=1),
    "lying": Pose(lying, Area(-3.6, -1.6, 1.5, 1.8), share=1),
}
