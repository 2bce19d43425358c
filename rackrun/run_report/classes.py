"""What a model confuses: accuracy by class, and the matrix of labels and answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from rackrun.run_report.folder import Predictions
from rackrun.run_report.template import data_url
from rackrun.terminal import one_line

MOST_CELLS = 20  # classes whose matrix is a table with numbers; beyond, it is an image
MOST_SHOWN = 20  # classes in the list of accuracies, the worst first
MOST_PAIRS = 10
IMAGE_PIXELS = 512  # of the image of a matrix


@dataclass(frozen=True)
class ClassAccuracy:
    """One class: how many of its validation images were right."""

    name: str
    right: int
    count: int

    @property
    def share(self) -> float:
        """Return the share of its images that were right."""
        return self.right / self.count


def by_class(predictions: Predictions) -> list[ClassAccuracy]:
    """Return the accuracy of the classes that have validation images, the worst first."""
    if predictions.confusion is None:
        return []
    right, counts = predictions.confusion.diagonal(), predictions.confusion.sum(1)
    classes = [
        ClassAccuracy(one_line(str(name)), int(right[number]), int(counts[number]))
        for number, name in enumerate(predictions.classes)
        if counts[number]
    ]
    return sorted(classes, key=lambda one: one.share)[:MOST_SHOWN]


def confusions(predictions: Predictions) -> list[tuple[int, str, str]]:
    """Return the pairs that are confused most: how often, the label, the model's answer."""
    if predictions.confusion is None:
        return []
    wrong = predictions.confusion.copy()
    np.fill_diagonal(wrong, 0)
    names = [one_line(str(name)) for name in predictions.classes]
    cells = np.argsort(wrong, axis=None)[::-1][:MOST_PAIRS]
    pairs = (np.unravel_index(cell, wrong.shape) for cell in cells)
    return [
        (int(wrong[label, predicted]), names[label], names[predicted])
        for label, predicted in pairs
        if wrong[label, predicted]
    ]


def matrix(predictions: Predictions) -> Markup | str:
    """Return the confusion matrix: a table with numbers, or an image where classes are many."""
    if predictions.confusion is None:
        return ""
    shares = predictions.confusion / np.maximum(1, predictions.confusion.sum(1, keepdims=True))
    if len(predictions.classes) > MOST_CELLS:
        return _matrix_image(shares)
    names = [one_line(str(name).split(",")[0]) for name in predictions.classes]
    head = Markup("").join(Markup('<th scope="col">{}</th>').format(name) for name in names)
    rows = Markup("").join(
        Markup('<tr><th scope="row">{}</th>{}</tr>').format(
            name, _cells(predictions.confusion, shares, n)
        )
        for n, name in enumerate(names)
    )
    return Markup('<table class="matrix"><tr><td></td>{}</tr>{}</table>').format(head, rows)


def _cells(counts: NDArray[np.int64], shares: NDArray[np.float64], row: int) -> Markup:
    cell = Markup('<td class="{}" style="--share:{:.2f}">{:,}</td>')
    return Markup("").join(
        cell.format("right" if row == column else "wrong", shares[row, column], count)
        for column, count in enumerate(counts[row])
    )


def _matrix_image(shares: NDArray[np.float64]) -> Markup:
    """Return the matrix as a square, white where nothing is; root of shares, to see the rare."""
    dark = (255 * (1 - np.sqrt(np.clip(shares, 0, 1)))).astype(np.uint8)
    factor = max(1, IMAGE_PIXELS // len(shares))
    pixels = dark.repeat(factor, axis=0).repeat(factor, axis=1)[:, :, np.newaxis]
    source = data_url(pixels, "png")
    return Markup('<img class="matrix" alt="confusion matrix" src="{}">').format(source)
