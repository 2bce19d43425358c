"""What is wrong with an image or a class, and doctor.csv: the input of `convert drop`, `relabel`.

A row may be changed in any spreadsheet; only `action` decides what the two commands do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

COLUMNS = (
    *("split", "shard", "key", "class", "problem", "action", "new_class", "score", "reason"),
)
DROP, RELABEL, UNDECIDED = "drop", "relabel", ""
"""What a row asks for; UNDECIDED: nothing, until a person has looked at it."""

EXACT = LEAK, TWO_CLASSES, COPY = "leak", "two classes", "copy"
NEAR_LEAK, NEAR_COPY, LABEL = "near leak", "near copy", "label"
DAMAGED, EMPTY, ODD_SIZE, ODD_SHAPE = "damaged", "nearly empty", "odd size", "odd shape"
SMALL_CLASS, SIMILAR_CLASSES = "small class", "similar classes"

PROBLEMS = {
    LEAK: "exact copies of an image in another split: what is measured there is too good",
    NEAR_LEAK: "nearly the same as an image in another split",
    TWO_CLASSES: "the same image in two classes: one of the labels is wrong",
    LABEL: "the model is confident, on images it has not been fitted to, of another class",
    COPY: "exact copies of an image in the same split",
    NEAR_COPY: "nearly the same as an image in the same split: scaled, cropped, encoded anew,"
    " mirrored or tinted",
    DAMAGED: "cannot be read, or not be decoded",
    EMPTY: "all pixels have nearly the same brightness",
    ODD_SIZE: "much smaller than the others",
    ODD_SHAPE: "much wider or higher than the others",
    SIMILAR_CLASSES: "names that differ only by case, Unicode form or leading zeros",
    SMALL_CLASS: "few images to learn from, or none to measure on",
}
"""Every problem, the gravest first, and what it means."""


class ImagePosition(NamedTuple):
    """Where an image is: its split, and its row in the split's index."""

    split: str
    row: int


class Finding(NamedTuple):
    """A problem of one image, or, without a place, of a class."""

    problem: str
    position: ImagePosition | None
    label: int
    reason: str
    action: str = UNDECIDED
    new_class: str = ""
    score: float | None = None
    """How sure it is, 0 to 1."""
    other: ImagePosition | None = None
    """The image that this one is like."""


class Named(NamedTuple):
    """The names of an image."""

    shard: str
    key: str


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings by problem, the gravest first, and of each the surest first."""
    gravity = {problem: number for number, problem in enumerate(PROBLEMS)}
    return sorted(findings, key=lambda each: (gravity[each.problem], -(each.score or 0.0)))
