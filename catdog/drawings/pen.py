"""A pen that draws smooth shapes in the coordinates of the thing being drawn.

An ear is described where it sits on a head of radius 1; the pen knows where that head is on the
image, how large it is, how tilted, and whether it looks left. y points down, as in images.
Fixed shapes are written like the points of an SVG: `path("0,-1 .5,0 -.5,0")`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import cos, pi, radians, sin, sqrt
from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Colour = tuple[int, int, int]
Curve = NDArray[np.float64]  # (N, 2): x, y
Points = Sequence[tuple[float, float]] | Curve

PLACES_PER_PIECE = 6  # points on the curve between two given ones
LIGHT_CELL = 6  # pixels
SHADED, LIT = 140, 255  # on the map of light


@dataclass(frozen=True)
class Pen:
    """Draws on one image; `matrix` (2, 3) takes own coordinates to pixels.

    `light` is a coarse map of light and shade over the image, a cell for `LIGHT_CELL` pixels.
    """

    image: Image.Image
    brush: ImageDraw.ImageDraw
    matrix: Curve
    light: Image.Image | None = None

    @classmethod
    def on(cls, image: Image.Image, x: float = 0, y: float = 0, size: float = 1) -> "Pen":
        """Return a pen whose origin is at pixel (x, y) and whose unit is `size` pixels."""
        matrix = np.array([[size, 0, x], [0, size, y]], dtype=np.float64)
        return cls(image, ImageDraw.Draw(image), matrix)

    @property
    def unit(self) -> float:
        """The length of one own unit in pixels."""
        a, b, c, d = self.matrix[:, :2].ravel().tolist()
        return sqrt(abs(a * d - b * c))

    def at(
        self, x: float, y: float, size: float = 1, tilt: float = 0, mirror: bool = False
    ) -> "Pen":
        """Return a pen at (x, y) of this one, `size` times as large, tilted by degrees."""
        c, s = size * cos(radians(tilt)), size * sin(radians(tilt))
        flip = -1 if mirror else 1
        step = np.array([[c * flip, -s, x], [s * flip, c, y], [0, 0, 1]])
        return replace(self, matrix=self.matrix @ step)

    def pixels(self, points: Points) -> Curve:
        """Return the pen's own coordinates as pixels."""
        pixels: Curve = np.asarray(points) @ self.matrix[:, :2].T + self.matrix[:, 2]
        return pixels

    def polygon(self, corners: Points, colour: Colour) -> None:
        """Fill the corners as they are."""
        self.brush.polygon(self.pixels(corners).ravel().tolist(), fill=colour)

    def box(self, left: float, top: float, right: float, bottom: float, colour: Colour) -> None:
        """Fill a rectangle, tilted as the pen is."""
        self.polygon([(left, top), (right, top), (right, bottom), (left, bottom)], colour)

    def shape(self, points: Points, colour: Colour) -> None:
        """Fill the smooth closed curve through the points."""
        self.polygon(closed(points), colour)

    def oval(self, x: float, y: float, rx: float, ry: float, colour: Colour) -> None:
        """Fill an ellipse, tilted as the pen is."""
        self.polygon(circle() * (rx, ry) + (x, y), colour)

    def stroke(self, points: Points, width: float, colour: Colour) -> None:
        """Draw the smooth curve through the points, as thick all along."""
        line = self.pixels(opened(points)).ravel().tolist()
        thick = max(1, round(width * self.unit))
        self.brush.line(line, colour, thick, joint="curve")

    def limb(self, points: Points, start: float, end: float, colour: Colour) -> None:
        """Draw a leg or a tail: a curve that goes from one thickness to another, ends rounded."""
        middle = opened(points)
        along = np.gradient(middle, axis=0)
        normal = along[:, ::-1] * (-1, 1) / np.linalg.norm(along, axis=1, keepdims=True)
        half = normal * np.linspace(start / 2, end / 2, len(middle))[:, None]
        self.polygon(np.concatenate([middle + half, (middle - half)[::-1]]), colour)
        self.polygon(circle() * (start / 2) + middle[0], colour)
        self.polygon(circle() * (end / 2) + middle[-1], colour)

    @contextmanager
    def inside(self, outline: Curve) -> Iterator["Pen"]:
        """Return a pen that leaves no mark outside the outline."""
        layer, mask = self.image.copy(), Image.new("L", self.image.size)
        yield replace(self, image=layer, brush=ImageDraw.Draw(layer))
        ImageDraw.Draw(mask).polygon(self.pixels(outline).ravel().tolist(), fill=255)
        self.image.paste(layer, mask=mask)

    def rounded(self, outline: Curve) -> None:
        """Make a part look round: lit from above and the left, shaded below and right."""
        if self.light:
            cells = self.pixels(outline) / LIGHT_CELL
            middle, size = cells.mean(axis=0), np.ptp(cells, axis=0)
            shaded = (cells - middle) * 0.95 + middle
            lit = (cells - middle) * 0.82 + middle - size * (0.05, 0.08)
            brush = ImageDraw.Draw(self.light)
            brush.polygon(shaded.ravel().tolist(), fill=SHADED)
            brush.polygon(lit.ravel().tolist(), fill=LIT)

    def shadow(self, x: float, y: float, rx: float, ry: float) -> None:
        """Let a soft shadow fall on the ground."""
        if self.light:
            cells = self.pixels(circle() * (rx, ry) + (x, y)) / LIGHT_CELL
            ImageDraw.Draw(self.light).polygon(cells.ravel().tolist(), fill=SHADED)


@cache
def path(text: str) -> Curve:
    """Return the points of "x,y x,y …"."""
    points = np.array([pair.split(",") for pair in text.split()], dtype=np.float64)
    points.flags.writeable = False
    return points


def closed(points: Points) -> Curve:
    """Return the smooth closed curve through the points (Catmull-Rom)."""
    curve: Curve = _closed_weights(len(points)) @ np.asarray(points, dtype=np.float64)
    return curve


def opened(points: Points) -> Curve:
    """Return the smooth curve from the first point to the last."""
    given = np.asarray(points, dtype=np.float64)
    ends = np.concatenate([given[:1], given, given[-1:]])
    curve: Curve = _open_weights(len(ends)) @ ends
    return curve


def both_sides(half: Curve) -> Curve:
    """Return a closed outline from its right half, which starts on top and ends at the bottom."""
    return np.concatenate([half, half[-2:0:-1] * (-1, 1)])


def furry(outline: Curve, depth: float, random: Random) -> Curve:
    """Return the outline as tips and valleys of hair."""
    along = np.roll(outline, -1, axis=0) - np.roll(outline, 1, axis=0)
    normal = along[:, ::-1] * (1, -1) / (np.linalg.norm(along, axis=1, keepdims=True) + 1e-9)
    tips = [depth * (random.random() if place % 2 else -0.3) for place in range(len(outline))]
    hairy: Curve = outline + normal * np.array(tips)[:, None]
    return hairy


@cache
def circle() -> Curve:
    """Return the unit circle."""
    angle = np.linspace(0, 2 * pi, 28, endpoint=False)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


@cache
def _piece_weights() -> Curve:
    """Return weights (places, 4) of four adjacent points on the piece between the middle two."""
    t = np.arange(PLACES_PER_PIECE)[:, None] / PLACES_PER_PIECE
    powers = np.concatenate([np.ones_like(t), t, t**2, t**3], axis=1)
    basis = np.array([[0, 2, 0, 0], [-1, 0, 1, 0], [2, -5, 4, -1], [-1, 3, -3, 1]]) / 2
    weights: Curve = powers @ basis
    return weights


@cache
def _closed_weights(count: int) -> Curve:
    weights = np.zeros((count * PLACES_PER_PIECE, count))
    for piece in range(count):
        rows = slice(piece * PLACES_PER_PIECE, (piece + 1) * PLACES_PER_PIECE)
        for column in range(4):
            weights[rows, (piece + column - 1) % count] += _piece_weights()[:, column]
    return weights


@cache
def _open_weights(count: int) -> Curve:
    pieces = count - 3
    weights = np.zeros((pieces * PLACES_PER_PIECE + 1, count))
    for piece in range(pieces):
        rows = slice(piece * PLACES_PER_PIECE, (piece + 1) * PLACES_PER_PIECE)
        weights[rows, piece : piece + 4] += _piece_weights()
    weights[-1, count - 2] = 1
    return weights
