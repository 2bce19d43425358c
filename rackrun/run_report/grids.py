"""Images that a run has kept, with the model's answers, and what the model confuses.

They are archives of numpy's, which may come from a host: each part is checked, none unpickled.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sized
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from rackrun import npy
from rackrun.errors import DataError
from rackrun.shapes import shaped
from rackrun.terminal import one_line

MOST_TRAINING_IMAGES = 64
MOST_ARCHIVE_BYTES = 1 << 25  # compressed
MOST_CONTENT_BYTES = 1 << 28
MOST_SHOWN = 20  # classes in the list of accuracies, the worst first
MOST_PAIRS = 10
MATRIX_PIXELS = 512
WHOLE_NUMBERS, FRACTIONS = ("<i8", "<i4"), ("<f4", "<f8", "<f2")
TEXTS = re.compile(rb"'descr': '(<U\d{1,4})'")
DAMAGE = (  # what a damaged archive, or one that was made to harm, makes of zipfile
    *(ValueError, KeyError, OSError, EOFError, RuntimeError, OverflowError, TypeError),
    *(MemoryError, BadZipFile, zlib.error),
)

T = TypeVar("T")


class Answer(NamedTuple):
    """An image, its class, and what the model takes it for."""

    image: NDArray[np.uint8]  # (height, width, channels)
    key: str
    label: str
    predicted: str
    probability: float
    is_right: bool


@dataclass(frozen=True)
class Predictions:
    """Validation images and the model's answers."""

    images: NDArray[np.uint8]  # (N, height, width, channels)
    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    probability: NDArray[np.float32]
    keys: list[str]
    """The names of the images in their shards."""
    classes: list[str]
    confusion: NDArray[np.int64] | None = None
    """(classes, classes): validation images by label and by prediction."""

    def __post_init__(self) -> None:
        """Raise ValueError unless the parts fit together."""
        count, classes = len(self.images), range(len(self.classes))
        if self.images.ndim != 4 or self.images.shape[3] not in (1, 3):
            raise ValueError(f"images of shape {self.images.shape}")
        answers: tuple[Sized, ...] = (self.labels, self.predicted, self.probability, self.keys)
        if any(len(each) != count for each in answers):
            raise ValueError(f"not as many answers as there are images ({count})")
        if not all(int(label) in classes for label in (*self.labels, *self.predicted)):
            raise ValueError(f"a label outside the {len(classes)} classes")
        if self.confusion is not None and self.confusion.shape != (len(classes), len(classes)):
            raise ValueError(f"a confusion matrix of shape {self.confusion.shape}")

    @cached_property
    def answers(self) -> list[Answer]:
        """The answer to each image."""
        return [
            Answer(image, key, self.classes[label], self.classes[predicted], chance, right)
            for image, key, label, predicted, chance, right in zip(
                self.images,
                self.keys,
                self.labels.tolist(),
                self.predicted.tolist(),
                self.probability.tolist(),
                (self.labels == self.predicted).tolist(),
                strict=True,
            )
        ]

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """The confusion matrix, a zero by a zero one where there is none."""
        return np.zeros((0, 0), np.int64) if self.confusion is None else self.confusion

    @cached_property
    def shares(self) -> NDArray[np.float64]:
        """The confusion matrix as fractions of each label's images."""
        return np.asarray(self.counts / np.maximum(1, self.counts.sum(1, keepdims=True)))

    def by_class(self) -> list[tuple[float, str, int, int]]:
        """Return share right, class, images right and images of the worst classes with images."""
        right, counts = self.counts.diagonal().tolist(), self.counts.sum(1).tolist()
        rows = zip(self.classes, right, counts, strict=False)
        shares = [(right / count, name, right, count) for name, right, count in rows if count]
        return sorted(shares, key=lambda row: row[0])[:MOST_SHOWN]

    def confusions(self) -> list[tuple[int, str, str]]:
        """Return the pairs that are confused most: how often, the label, the model's answer."""
        wrong = self.counts.copy()
        np.fill_diagonal(wrong, 0)
        cells = np.argsort(wrong, axis=None)[::-1][:MOST_PAIRS].tolist()
        pairs = (divmod(cell, len(wrong)) for cell in cells)
        return [
            (int(wrong[label, answer]), self.classes[label], self.classes[answer])
            for label, answer in pairs
            if wrong[label, answer]
        ]

    def matrix_image(self) -> NDArray[np.uint8]:
        """Return the matrix as a square, white where nothing is; root of shares, to see the rare.

        uint8 (height, width, 1)
        """
        dark = (255 * (1 - np.sqrt(np.clip(self.shares, 0, 1)))).astype(np.uint8)
        factor = max(1, MATRIX_PIXELS // len(dark))
        return dark.repeat(factor, axis=0).repeat(factor, axis=1)[:, :, np.newaxis]


@dataclass(frozen=True)
class TrainingImages:
    """Images of the first batch, augmented and mixed, with their classes."""

    images: NDArray[np.uint8]  # (N, height, width, channels)
    captions: list[str]

    def __post_init__(self) -> None:
        """Raise ValueError unless the parts fit together."""
        shape = self.images.shape
        if len(shape) != 4 or shape[3] not in (1, 3) or 0 in shape:
            raise ValueError(f"images of shape {shape}")
        if not len(self.captions) == len(self.images) <= MOST_TRAINING_IMAGES:
            raise ValueError(f"{len(self.images)} images with {len(self.captions)} captions")


def read_predictions(path: Path) -> Predictions | None:
    """Return the images with answers, or None where there are none; DataError for damage."""

    def read(archive: ZipFile) -> Predictions:
        has_matrix = "confusion.npy" in archive.namelist()
        return Predictions(
            images=_array(archive, "images", "|u1"),
            labels=_array(archive, "labels", *WHOLE_NUMBERS),
            predicted=_array(archive, "predicted", *WHOLE_NUMBERS),
            probability=_array(archive, "probability", *FRACTIONS),
            keys=_texts(archive, "keys"),
            classes=_texts(archive, "classes"),
            confusion=_array(archive, "confusion", *WHOLE_NUMBERS) if has_matrix else None,
        )

    predictions = _read(path, read, "predictions")
    return predictions if predictions and len(predictions.images) else None


def read_training_images(path: Path) -> TrainingImages | None:
    """Return the images of the first batch; None without the file, DataError for damage."""

    def read(archive: ZipFile) -> TrainingImages:
        return TrainingImages(_array(archive, "images", "|u1"), _texts(archive, "captions"))

    return _read(path, read, "training images")


def _read(path: Path, read: Callable[[ZipFile], T], what: str) -> T | None:
    if not path.exists():
        return None
    try:
        if path.stat().st_size > MOST_ARCHIVE_BYTES:
            raise ValueError(f"more than {MOST_ARCHIVE_BYTES} bytes")
        with ZipFile(path) as archive:
            if sum(part.file_size for part in archive.infolist()) > MOST_CONTENT_BYTES:
                raise ValueError(f"more than {MOST_CONTENT_BYTES} bytes")
            return read(archive)
    except DAMAGE as error:
        why = one_line(str(error))[:200]
        raise DataError(f"{path}: not a grid of {what}: {why}") from None


def _array(archive: ZipFile, name: str, *descrs: str) -> NDArray[Any]:
    return npy.array(_content(archive, name), *descrs)


def _texts(archive: ZipFile, name: str) -> list[str]:
    """Return an array of text, whose type has the length of the longest."""
    data = _content(archive, name)
    if not (descr := TEXTS.search(data, 0, npy.LONGEST_HEADER)):
        raise ValueError(f"{name} is not text")
    texts: list[str] = shaped(npy.array(data, descr[1].decode()).tolist(), list[str], name)
    return texts


def _content(archive: ZipFile, name: str) -> bytes:
    entry = archive.getinfo(f"{name}.npy")
    if entry.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed in another way than by numpy")
    return archive.read(entry)
