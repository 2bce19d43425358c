"""The tables of an evaluation on a terminal."""

import sys
from collections.abc import Sequence

from rackrun.tables import table
from rackrun.terminal import clean
from rackrun.training.counts import TOP5_CLASSES
from rackrun.training.judge.evaluation import Evaluation
from rackrun.training.scores import ClassScore

MOST_CLASSES = 20  # rows; of more classes, the worst are shown
MOST_COLUMNS = 10  # of a confusion matrix
MOST_CONFUSIONS = 10


def print_evaluation(evaluation: Evaluation) -> None:
    """Print the sums, the classes, and what was taken for what."""
    parts = [_summary(evaluation), _classes(evaluation.classes)]
    if evaluation.confusion:
        is_small = len(evaluation.classes) <= MOST_COLUMNS
        parts.append(_matrix(evaluation) if is_small else _confusions(evaluation))
    sys.stdout.write("\n".join(parts))


def _summary(evaluation: Evaluation) -> str:
    counts = evaluation.scores.counts
    cells = {
        "samples": f"{counts.samples:,}",
        "loss": f"{counts.mean_loss:.4f}",
        "top-1": f"{counts.accuracy:.2%}",
    }
    if len(evaluation.classes) > TOP5_CLASSES:
        cells["top-5"] = f"{counts.accuracy5:.2%}"
    cells["calibration error"] = f"{evaluation.scores.calibration_error:.2%}"
    if counts.skipped:
        cells["left out"] = f"{counts.skipped:,}"
    return table([*cells], [[*cells.values()]], numbers=[*cells])


def _classes(classes: Sequence[ClassScore]) -> str:
    shown = [each for each in classes if each.samples or each.predicted]
    name = "class"
    if len(shown) > MOST_CLASSES:
        name = f"worst of {len(shown):,} classes"
        # A class that is only predicted has no accuracy; it is none of the worst.
        shown.sort(key=lambda each: 1.0 if each.accuracy is None else each.accuracy)
        shown = shown[:MOST_CLASSES]
    rows = [
        (clean(each.name), f"{each.samples:,}", _share(each.accuracy), _share(each.precision))
        for each in shown
    ]
    numbers = ("samples", "accuracy", "precision")
    return table((name, *numbers), rows, wrapped=[name], numbers=numbers)


def _matrix(evaluation: Evaluation) -> str:
    names = [clean(each.name) for each in evaluation.classes]
    rows = [
        (name, *(f"{count:,}" for count in row))
        for name, row in zip(names, evaluation.confusion, strict=True)
    ]
    return table(("label ↓ predicted →", *names), rows, numbers=names)


def _confusions(evaluation: Evaluation) -> str:
    mistakes = evaluation.mistakes(MOST_CONFUSIONS)
    rows = [(f"{count:,}", clean(label), clean(predicted)) for count, label, predicted in mistakes]
    return table(("mistakes", "label", "predicted"), rows, numbers=["mistakes"])


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.2%}"
