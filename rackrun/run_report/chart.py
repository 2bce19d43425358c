"""Curves as inline SVG: a browser needs neither scripts nor a network for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape

from rackrun.run_report.folder import Values

WIDTH, HEIGHT = 480, 230  # of the drawing; the page scales it
LEFT, RIGHT, TOP, BOTTOM = 64, 10, 10, 26  # margins
LABEL = 12  # of the room that the label of x takes beside the axis
MOST_POINTS = 400  # of a curve: more than a screen can show
TICKS = 5
EPOCH = "epoch"
HIDING = 2.0  # a curve nowhere further from another one lies on top of it
DASH = 8
DOT, RING, MOST_RINGS = 3, 2, 4
ROUND = (1, 2, 2.5, 5, 10)  # distances of ticks, times a power of ten
COLORS = 8  # that the page's style has


@dataclass(frozen=True)
class Series:
    """Points of one color; `dots` marks each of them."""

    label: str
    x: Values
    y: Values
    color: int = 0
    """The number of a color of the page's style."""
    faint: bool = False
    dots: bool = False


def chart(
    curves: Sequence[Series],
    shown: Callable[[float], str],
    x_label: str = EPOCH,
    y_range: tuple[float, float] | None = None,
) -> Markup:
    """Return a drawing of curves over a common x; `shown` writes a value of y."""
    drawn = [finite(curve) for curve in curves]
    drawn = [curve for curve in drawn if len(curve.x)]
    if not drawn:
        return Markup('<p class="none">nothing measured</p>')
    x_low, x_high = spread(np.concatenate([curve.x for curve in drawn]))
    y_low, y_high = y_range or spread(np.concatenate([curve.y for curve in drawn]))

    def across(x: Values) -> Values:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def down(y: Values) -> Values:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [Markup('<svg viewBox="0 0 {} {}" role="img">').format(WIDTH, HEIGHT)]
    for tick in ticks(y_low, y_high):
        y = float(down(np.array(tick)))
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y) + _text(LEFT - 6, y + 4, shown(tick), "end"))
    has_whole = x_label == EPOCH and math.floor(x_high) >= x_low  # else it is in its first epoch
    whole = has_whole or all(np.array_equal(curve.x, np.round(curve.x)) for curve in drawn)
    for tick in ticks(x_low, x_high, whole):
        if (x := float(across(np.array(tick)))) > LEFT + LABEL:
            parts.append(_text(x, HEIGHT - 8, f"{tick:g}", "middle"))
    parts.append(_text(0, HEIGHT - 8, x_label, "start"))
    points = [np.stack([across(curve.x), down(curve.y)], 1) for curve in drawn]
    for number, curve in enumerate(drawn):
        twins = [
            n
            for n, other in enumerate(drawn)
            if other.faint == curve.faint and _look_alike(points[number], points[n])
        ]
        parts.append(_course(curve, points[number], twins.index(number), len(twins)))
    return Markup("").join([*parts, Markup("</svg>")])


def finite(curve: Series) -> Series:
    """Return a curve without what is no number, and with no more points than can be seen."""
    is_finite = np.isfinite(curve.x) & np.isfinite(curve.y)
    x, y = curve.x[is_finite], curve.y[is_finite]
    if len(x) > MOST_POINTS:
        edges = np.linspace(0, len(x), MOST_POINTS + 1).astype(int)[:-1]
        counts = np.diff([*edges, len(x)])
        x, y = np.add.reduceat(x, edges) / counts, np.add.reduceat(y, edges) / counts
    return Series(curve.label, x, y, curve.color, curve.faint, curve.dots)


def spread(values: Values) -> tuple[float, float]:
    """Return the lowest and the highest value, never the same."""
    low, high = float(values.min()), float(values.max())
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    return low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2


def ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Return round numbers between two values; whole ones for epochs and the like."""
    rough = max((high - low) / TICKS, float(whole))  # whole numbers are 1 apart at least
    power = 10 ** math.floor(math.log10(rough))
    # 0.999 and 1e-9: rounding of floats must not cost a tick.
    steps = (power * factor for factor in ROUND if power * factor >= rough * 0.999)
    step = next(step for step in steps if not whole or step == round(step))
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _look_alike(points: Values, others: Values) -> bool:
    return points.shape == others.shape and bool(np.abs(points - others).max() < HIDING)


def _course(curve: Series, points: Values, before: int, twins: int) -> Markup:
    """Draw a curve; dashes and rings let `before` of its `twins`, drawn under it, shine through."""
    color = f"c{curve.color % COLORS}"
    kind = f"{color} faint" if curve.faint else color
    dashes: Markup | str = ""
    if before:
        form = Markup(' stroke-dasharray="{} {}" stroke-dashoffset="{}"')
        dashes = form.format(DASH, DASH * (twins - 1), -DASH * before)
    text = Markup('<polyline class="{}" points="{}"{}><title>{}</title></polyline>').format(
        kind, " ".join(f"{x:.1f},{y:.1f}" for x, y in points), dashes, curve.label
    )
    radius = DOT + RING * min(twins - 1 - before, MOST_RINGS)
    for x, y in points if curve.dots or len(points) == 1 else ():
        form = Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{}"/>')
        text += form.format(kind, x, y, radius)
    return text


def _line(x1: float, y1: float, x2: float, y2: float) -> Markup:
    return Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(x1, y1, x2, y2)


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    form = Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>')
    return form.format(x, y, anchor, escape(text))
