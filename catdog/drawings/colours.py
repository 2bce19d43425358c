"""Colours: darker, lighter, mixed, nearly the same."""

from random import Random

from catdog.drawings.pen import Colour

INK: Colour = (38, 32, 34)
PINK: Colour = (226, 148, 150)
WHITE: Colour = (255, 255, 255)


def shade(colour: Colour, factor: float) -> Colour:
    """Return the colour darker (below 1) or lighter (above 1)."""
    lift = 12 if factor > 1 else 0  # black times anything stays black
    red, green, blue = (_byte(part * factor + lift) for part in colour)
    return red, green, blue


def mix(one: Colour, other: Colour, share: float) -> Colour:
    """Return a colour between two, `share` of it the other."""
    red, green, blue = (_byte(a + (b - a) * share) for a, b in zip(one, other, strict=True))
    return red, green, blue


def vary(colour: Colour, amount: float, random: Random) -> Colour:
    """Return nearly the same colour, each part up to 1.5 times `amount` off."""
    light = random.uniform(-amount, amount)
    red, green, blue = (
        _byte(part + light + random.uniform(-amount, amount) / 2) for part in colour
    )
    return red, green, blue


def contrast(colour: Colour) -> Colour:
    """Return a colour for lines upon this one: darker on light, lighter on dark."""
    return shade(colour, 0.48) if sum(colour) > 240 else shade(colour, 2.1)


def _byte(value: float) -> int:
    return min(255, max(0, round(value)))
