"""Coats of cats and dogs: the same colours and patterns, so that no coat gives a kind away."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from catdog.drawings.colours import contrast, mix, shade, vary
from catdog.drawings.pen import Colour, Curve, Pen, circle, furry

FURS: tuple[Colour, ...] = (
    (226, 141, 62),  # ginger
    (238, 214, 176),  # cream
    (58, 54, 58),  # black
    (138, 140, 146),  # grey
    (129, 88, 56),  # brown
    (82, 55, 40),  # chocolate
    (240, 238, 232),  # white
    (203, 166, 114),  # sand
    (100, 110, 126),  # blue
    (176, 100, 52),  # fox
)
PALE: Colour = (242, 238, 230)


@dataclass(frozen=True)
class Area:
    """The box a pattern has to cover."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def width(self) -> float:
        """From left to right."""
        return self.right - self.left

    @property
    def middle(self) -> float:
        """x half-way."""
        return (self.left + self.right) / 2

    def down(self, share: float) -> float:
        """Return y at a share of the way from the top."""
        return self.top + (self.bottom - self.top) * share

    def anywhere(self, random: Random) -> tuple[float, float]:
        """Return a point by chance."""
        return random.uniform(self.left, self.right), random.uniform(self.top, self.bottom)


@dataclass(frozen=True)
class Coat:
    """One animal's fur: colours, pattern, length of the hair (of a head's radius)."""

    base: Colour
    second: Colour  # patches, stripes, spots
    pale: Colour  # muzzle, chest, paws
    pattern: str
    hair: float
    random: Random  # for what is drawn hair by hair

    @classmethod
    def drawn(cls, random: Random) -> "Coat":
        """Return a coat by chance."""
        base, second = (vary(fur, 14, random) for fur in random.sample(FURS, 2))
        pattern = random.choice(list(PATTERNS))
        if pattern == "stripes":
            second = shade(base, 0.55) if sum(base) > 300 else shade(base, 1.6)
        pale = vary(PALE, 8, random)
        if random.random() < 0.45:
            pale = mix(base, pale, random.uniform(0.15, 0.5))
        return cls(base, second, pale, pattern, random.choice((0, 0.03, 0.05, 0.09)), random)

    @property
    def line(self) -> Colour:
        """The colour of lines drawn upon the fur."""
        return contrast(self.base)

    @property
    def extremities(self) -> Colour:
        """The colour of tails and ear tips."""
        return self.second if self.pattern in ("saddle", "patches") else shade(self.base, 0.9)

    def part(self, pen: Pen, outline: Curve, colour: Colour | None = None) -> Curve:
        """Fill a part of the animal with plain fur; gives back its hairy outline."""
        colour = colour or self.base
        if self.hair:
            outline = furry(outline, self.hair, self.random)
        middle = outline.mean(axis=0)
        pen.polygon(outline, shade(colour, 0.72))
        pen.polygon((outline - middle) * 0.975 + middle, colour)
        pen.rounded(outline)
        return outline

    def patterned(self, pen: Pen, outline: Curve, area: Area) -> None:
        """Fill a part with fur and lay the pattern over it."""
        with pen.inside(self.part(pen, outline)) as inner:
            PATTERNS[self.pattern](inner, self, area)
            self._strands(inner, area)

    def _strands(self, pen: Pen, area: Area) -> None:
        """Draw single hairs, lighter and darker than the fur."""
        for _ in range(26):
            x, y = area.anywhere(self.random)
            colour = shade(self.base, self.random.choice((0.8, 0.88, 1.12, 1.22)))
            lean = 0.12 * (x - area.middle) / area.width
            pen.polygon([(x - 0.015, y), (x + 0.015, y), (x + lean, y + 0.16)], colour)


def plain(pen: Pen, coat: Coat, area: Area) -> None:
    """Draw one colour."""


def stripes(pen: Pen, coat: Coat, area: Area) -> None:
    """Draw bands from the back downwards, as tabbies and brindles have."""
    random, count = coat.random, coat.random.randint(5, 8)
    for number in range(count):
        x = area.left + area.width * (number + random.uniform(0.3, 0.7)) / count
        end = (x + 0.5 * (x - area.middle) / area.width, area.down(random.uniform(0.28, 0.62)))
        bend = ((x + end[0]) / 2 + random.uniform(-0.1, 0.1), (area.top + end[1]) / 2)
        pen.limb([(x, area.top - 0.1), bend, end], area.width * 0.075, 0.02, coat.second)


def patches(pen: Pen, coat: Coat, area: Area) -> None:
    """Draw a few large patches."""
    for _ in range(coat.random.randint(2, 4)):
        _blot(pen, coat, area, coat.random.uniform(0.2, 0.36))


def spots(pen: Pen, coat: Coat, area: Area) -> None:
    """Draw many small spots."""
    for _ in range(coat.random.randint(9, 16)):
        _blot(pen, coat, area, coat.random.uniform(0.04, 0.085))


def saddle(pen: Pen, coat: Coat, area: Area) -> None:
    """Draw the second colour over the upper part."""
    depth = area.down(coat.random.uniform(0.1, 0.4)) - area.top
    pen.oval(area.middle, area.top, area.width * 0.6, depth + 0.15, coat.second)


def _blot(pen: Pen, coat: Coat, area: Area, size: float) -> None:
    """Draw an uneven blot somewhere in the area, `size` of its width."""
    corners = circle()[::5] * [
        (coat.random.uniform(0.7, 1.2), coat.random.uniform(0.7, 1.2)) for _ in range(6)
    ]
    pen.shape(corners * size * area.width + area.anywhere(coat.random), coat.second)


PATTERNS: dict[str, Callable[[Pen, Coat, Area], None]] = {
    "plain": plain,
    "stripes": stripes,
    "patches": patches,
    "spots": spots,
    "saddle": saddle,
}
