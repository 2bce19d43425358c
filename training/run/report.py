"""A run as one image: its headline numbers, its curves, and the model's predictions.

    metrics.jsonl, config.json, predictions.npz -> report.png

`python -m training.run.report RUN` draws it at any time. A run itself draws report.html only: to
import matplotlib and draw took its first rank 1.4 s longer at the end.
"""

import sys
import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from rackrun.atomic import write_whole
from rackrun.commandline import run
from rackrun.errors import UsageError
from rackrun.run_report.folder import Line, Said, Story, Values, mean_speed, read, smoothed, values
from rackrun.terminal import one_line
from training.recorded import with_new_names
from training.run.folder import RunFiles

PAPER, INK, FAINT, GRID = "#ffffff", "#1f2430", "#7a8194", "#e8eaf0"
TRAIN, VALIDATION, RIGHT, WRONG = "#3b6fd4", "#e07b39", "#2e9e5b", "#d13b3b"
WIDTH, DOTS = 12.8, 110  # inches, dots per inch
MARGIN = 0.024  # left and right, of the width
HEAD, CURVES, TITLE = 1.7, 5.4, 0.5  # heights in inches
COLUMNS = 8  # images side by side
CELL = WIDTH * (1 - 2 * MARGIN) / COLUMNS  # inches
ROW = 1.19  # height of a row of images, with its captions, in cells


def write(folder: Path) -> Path:
    """Draw the image into a run's folder; raise DataError if a file there is invalid."""
    picture = RunFiles(folder).report_image
    figure, image = drawn(read_story(folder)), BytesIO()
    FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # such a letter is drawn as a box
        figure.savefig(image, format="png", metadata={"Software": None})
    write_whole(picture, image.getvalue())
    return picture


def read_story(folder: Path) -> Story:
    """Return everything the image shows; raise UsageError if nothing was measured yet."""
    metrics = RunFiles(folder).metrics
    if not metrics.exists():
        raise UsageError(f"{folder}: not the folder of a run: {metrics.name} is missing")
    return read(folder)


def drawn(story: Story) -> Figure:
    """Return the page."""
    rows = rows_of(story.said) if story.said else 0
    heights = [HEAD, CURVES, rows * ROW * CELL + TITLE]
    figure = Figure((WIDTH, sum(heights)), dpi=DOTS, facecolor=PAPER)
    head, curves, grid = figure.subfigures(3, 1, squeeze=False, height_ratios=heights)[:, 0]
    _head(head, story)
    _curves(curves, story)
    if story.said:
        _grid(grid, story.said, story.judged_by, TITLE / heights[-1])
    return figure


def _head(figure: SubFigure, story: Story) -> None:
    """Name, settings, headline numbers."""
    name, settings = one_line(story.name), _settings(with_new_names(story.config))
    figure.text(MARGIN, 0.75, name, fontsize=19, fontweight="bold", color=INK, parse_math=False)
    figure.text(MARGIN, 0.6, settings, fontsize=9.5, color=FAINT, parse_math=False)
    for number, (value, label) in enumerate(_headlines(story)):
        x = MARGIN + 0.195 * number
        figure.text(x, 0.24, value, fontsize=22, fontweight="bold", color=INK)
        figure.text(x, 0.1, label, fontsize=9.5, color=FAINT)


def _settings(config: dict[str, Any]) -> str:
    """Return the settings that matter most, in a line."""
    names = ("recipe", "model", "data", "image_size", "batch_size", "optimizer", "lr", "seed")
    return "   ".join(
        f"{name.replace('_', ' ')} {one_line(str(config[name]))}"
        for name in names
        if config.get(name) != "" and name in config
    )


def _headlines(story: Story) -> list[tuple[str, str]]:
    """Return the headline numbers, and what each of them is."""
    found = []
    noise = story.config.get("synthetic")
    if story.validation and not noise:
        last, best = story.validation[-1], max(story.validation, key=lambda line: line["top1"])
        found.append(
            (f"{last['top1']:.1%}", f"of {last['samples']:,} {story.judged_by} images correct")
        )
        if last.get("top5") is not None:
            found.append((f"{last['top5']:.1%}", "correct among the first five"))
        found.append((f"{best['top1']:.1%}", f"at best, after epoch {best['epoch']:g}"))
        found.append((f"{last['loss']:.3f}", f"{story.judged_by} loss"))
    elif story.train and not noise:
        found.append((f"{story.train[-1]['accuracy']:.1%}", "of the last training images correct"))
        found.append((f"{story.train[-1]['loss']:.3f}", "training loss"))
    if story.train:
        speed = mean_speed(story.train)
        found.append((f"{speed:,.0f}", "images/s"))
        found.append(
            (f"{story.train[-1]['epoch']:g}", f"epochs, {story.train[-1]['step']:,} steps")
        )
    return found[:5] or [("–", "nothing measured yet")]


def _curves(figure: SubFigure, story: Story) -> None:
    """Draw loss and accuracy, and below them speed and lr."""
    (loss, accuracy), (speed, rate) = figure.subplots(2, 2, height_ratios=(3, 2))
    edges = {"left": MARGIN + 0.025, "right": 1 - MARGIN, "top": 0.95, "bottom": 0.09}
    figure.subplots_adjust(**edges, wspace=0.1, hspace=0.26)
    split = story.judged_by
    _panel(loss, "loss", story.train, "loss", story.validation, "loss", split)
    _panel(accuracy, "accuracy", story.train, "accuracy", story.validation, "top1", split)
    accuracy.set_ylim(top=1.005)
    accuracy.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _panel(speed, "images/s", story.train, "images_per_second")
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter(EngFormatter(sep=""))
    _panel(rate, "learning rate", story.train, "rate", smooth=False)
    rate.set_ylim(bottom=0)
    for axes in (speed, rate):
        axes.set_xlabel("epoch", color=FAINT, fontsize=9)


def _panel(
    axes: Axes,
    title: str,
    train: list[Line],
    of_train: str,
    validation: Sequence[Line] = (),
    of_validation: str = "",
    split: str = "",
    smooth: bool = True,
) -> None:
    """Draw one quantity over the epochs."""
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=8.5, length=0)
    axes.spines[:].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    _train_curve(axes, values(train, "epoch"), values(train, of_train), smooth)
    if validation:
        epochs, judged = values(validation, "epoch"), values(validation, of_validation)
        axes.plot(epochs, judged, "o-", color=VALIDATION, lw=2, ms=5, label=split)
        axes.legend(loc="center right", frameon=False, fontsize=9, labelcolor=INK)


def _train_curve(axes: Axes, epochs: Values, values: Values, smooth: bool) -> None:
    """Draw the points faintly, and a smoothed curve."""
    if len(epochs) == 1:
        axes.plot(epochs, values, "o", color=TRAIN, label="training")
        return
    if smooth:
        axes.plot(epochs, values, color=TRAIN, alpha=0.25, linewidth=1)
    course = smoothed(values) if smooth else values
    axes.plot(epochs, course, color=TRAIN, linewidth=2, label="training")


def rows_of(said: Said) -> int:
    """Return the rows of the grid of images."""
    return -(-len(said.images) // COLUMNS)


def _grid(figure: SubFigure, said: Said, judged_by: str, title: float) -> None:
    """Draw images with a green or a red frame, and the prediction below each."""
    right = int((said.labels == said.predicted).sum())
    text = f"Predictions on {len(said.images)} {judged_by} images: {right} correct"
    figure.text(MARGIN, 1 - 0.6 * title, text, fontsize=10.5, fontweight="bold", color=INK)
    axes = figure.add_axes((MARGIN, 0, 1 - 2 * MARGIN, 1 - title))
    axes.set(xlim=(0, COLUMNS), ylim=(rows_of(said) * ROW, 0))
    axes.axis("off")
    for number in range(len(said.images)):
        row, column = divmod(number, COLUMNS)
        _image(axes, column, row * ROW, said, number)


def _image(axes: Axes, x: float, y: float, said: Said, number: int) -> None:
    """Draw one image, about a cell large, with its corner at (x, y)."""
    left, right, bottom = x + 0.02, x + 0.98, y + 0.96
    label, predicted = int(said.labels[number]), int(said.predicted[number])
    colour = RIGHT if label == predicted else WRONG
    pixels = np.broadcast_to(said.images[number], (*said.images.shape[1:3], 3))
    axes.imshow(pixels, extent=(left, right, bottom, y), interpolation="bicubic", aspect="auto")
    frame = Rectangle((left, y), right - left, bottom - y, fill=False, ec=colour, linewidth=2.5)
    axes.add_patch(frame)
    text = f"{_short(said.classes[predicted])} {said.probability[number]:.0%}"
    if label != predicted:
        text += f", is {_short(said.classes[label])}"
    axes.text(left, bottom + 0.04, text, color=colour, fontsize=9, va="top", parse_math=False)


def _short(name: str) -> str:
    """Return a class name that fits below an image."""
    name = one_line(name.split(",")[0])
    return name if len(name) <= 14 else f"{name[:13]}…"


def main(args: list[str]) -> None:
    """Draw the image of a run, also during the run, as `python -m training.run.report RUN`."""
    if len(args) != 1 or args[0].startswith("-"):
        raise UsageError("type python -m training.run.report RUN, with RUN the folder of a run")
    sys.stdout.write(f"{write(Path(args[0]))}\n")


if __name__ == "__main__":
    run(main)
