"""The tables of an evaluation on a terminal."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rackrun.terminal import clean
from rackrun.training.counts import TOP5_CLASSES
from rackrun.training.evaluation import ClassScore
from rackrun.training.judge.evaluation import Evaluation

MOST_CLASSES = 20  # rows; of more classes, the worst are shown
MOST_COLUMNS = 10  # of a confusion matrix
MOST_CONFUSIONS = 10


def print_evaluation(evaluation: Evaluation) -> None:
    """Print the sums, the classes, and what was taken for what."""
    console = Console(width=None if sys.stdout.isatty() else 1000, highlight=False)
    console.print(_summary(evaluation))
    console.print()
    console.print(_classes(evaluation.classes))
    if evaluation.confusion:
        console.print()
        small = len(evaluation.classes) <= MOST_COLUMNS
        console.print(_matrix(evaluation) if small else _confusions(evaluation))


def _summary(evaluation: Evaluation) -> Table:
    counts = evaluation.scores.counts
    table = _table(("samples", "right"), ("loss", "right"), ("top-1", "right"))
    row = [f"{counts.samples:,}", f"{counts.mean_loss:.4f}", f"{counts.accuracy:.2%}"]
    if len(evaluation.classes) > TOP5_CLASSES:
        table.add_column("top-5", justify="right")
        row.append(f"{counts.accuracy5:.2%}")
    table.add_column("calibration error", justify="right")
    row.append(f"{evaluation.scores.calibration_error:.2%}")
    if counts.skipped:
        table.add_column("left out", justify="right")
        row.append(f"{counts.skipped:,}")
    table.add_row(*row)
    return table


def _classes(classes: Sequence[ClassScore]) -> Table:
    shown = [each for each in classes if each.samples or each.predicted]
    name = "class"
    if len(shown) > MOST_CLASSES:
        name = f"worst of {len(shown):,} classes"
        # A class that is only predicted has no accuracy; it is none of the worst.
        shown.sort(key=lambda each: 1.0 if each.accuracy is None else each.accuracy)
        shown = shown[:MOST_CLASSES]
    table = _table((name, "left"), ("samples", "right"), ("accuracy", "right"))
    table.add_column("precision", justify="right")
    for each in shown:
        shares = (_share(each.accuracy), _share(each.precision))
        table.add_row(_name(each.name), f"{each.samples:,}", *shares)
    return table


def _matrix(evaluation: Evaluation) -> Table:
    names = [_name(each.name) for each in evaluation.classes]
    table = _table(("label ↓ predicted →", "left"))
    for name in names:
        table.add_column(name, justify="right")
    for label, (name, row) in enumerate(zip(names, evaluation.confusion, strict=True)):
        cells = (
            Text(f"{count:,}", style="bold" if label == predicted else "dim" if not count else "")
            for predicted, count in enumerate(row)
        )
        table.add_row(name, *cells)
    return table


def _confusions(evaluation: Evaluation) -> Table:
    table = _table(("mistakes", "right"), ("label", "left"), ("predicted", "left"))
    for count, label, predicted in evaluation.mistakes(MOST_CONFUSIONS):
        table.add_row(f"{count:,}", _name(label), _name(predicted))
    return table


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, side in columns:
        table.add_column(name, justify="right" if side == "right" else "left")
    return table


def _name(name: str) -> Text:
    return Text(clean(name))


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.2%}"
