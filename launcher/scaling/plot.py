"""Draws a scaling curve; the only file of the launcher that imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator, PercentFormatter

if TYPE_CHECKING:
    from launcher.scaling.model import Curve, Spread

INK, FAINT, GRID, MEASURED = "#1f2430", "#7a8194", "#e8eaf0", "#3b6fd4"
NETWORKS = ("#d13b3b", "#e07b39", "#c9a227", "#5fa777", "#2e7d5b")  # from slow to fast


def draw(curve: Curve, gigabits: Sequence[float]) -> bytes:
    """Return a PNG: images per second as measured, and efficiencies as predicted, if at all."""
    figure = Figure(figsize=(12.5, 4.6), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _rates(left, curve)
    _efficiencies(right, curve, gigabits)
    for axes in (left, right):
        axes.set_xlabel("hosts", color=INK)
        axes.grid(color=GRID)
        axes.tick_params(colors=FAINT)
        axes.spines[["top", "right"]].set_visible(False)
    buffer = BytesIO()
    canvas.print_png(buffer)  # type: ignore[no-untyped-call]
    return buffer.getvalue()


def _rates(axes: Axes, curve: Curve) -> None:
    hosts = [point.hosts for point in curve.points]
    spreads = [point.rate for point in curve.points]
    rates = [spread.middle for spread in spreads]
    ideal = [rates[0] / hosts[0] * count for count in hosts]
    axes.plot(hosts, ideal, "--", color=FAINT, label="in proportion to the first")
    _bars(axes, hosts, spreads, "o-")
    axes.set_title("images/s", color=INK, loc="left")
    axes.set_ylim(0, max(*ideal, *(spread.high for spread in spreads)) * 1.05)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(FixedLocator(hosts))
    axes.legend(frameon=False, labelcolor=INK)


def _efficiencies(axes: Axes, curve: Curve, gigabits: Sequence[float]) -> None:
    for speed, color in zip(gigabits, NETWORKS, strict=False):
        predicted = [curve.predicted(count, speed) for count in curve.hosts]
        lows, middles, highs = zip(*predicted, strict=True)
        axes.plot(curve.hosts, middles, "-", color=color, label=f"{speed:g} Gbit/s, predicted")
        axes.fill_between(curve.hosts, lows, highs, color=color, alpha=0.15, linewidth=0)
    measured = [curve.efficiency(point) for point in curve.points]
    _bars(axes, [point.hosts for point in curve.points], measured, "o")
    axes.set_title("efficiency", color=INK, loc="left")
    axes.set_ylim(0, max(1.08, *(spread.high for spread in measured)))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([1, *curve.hosts]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(frameon=False, labelcolor=INK, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _bars(axes: Axes, hosts: Sequence[int], spreads: Sequence[Spread], style: str) -> None:
    """Draw medians, with bars from the least to the greatest."""
    lows, middles, highs = (list(values) for values in zip(*spreads, strict=True))
    below = [middle - low for low, middle in zip(lows, middles, strict=True)]
    above = [high - middle for middle, high in zip(middles, highs, strict=True)]
    axes.errorbar(
        hosts, middles, (below, above), fmt=style, color=MEASURED, capsize=3, label="measured"
    )
