"""What is wrong with an image or a class, and the checks that need no model to find it.

Findings become doctor.csv, the input of `convert drop` and `convert relabel`. A row may be changed
in any spreadsheet; only `action` decides what the two commands do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rackrun.convert.doctor.fingerprints import SOUND, UNDECODED, Fingerprints, ImagePosition
from rackrun.convert.doctor.near_copies import NearPair, Prints, near_pairs
from rackrun.convert.packing.copies import SplitRows, groups_of_copies
from rackrun.convert.packing.plan import TRAIN
from rackrun.convert.readers.names import similar
from rackrun.shards.source import Source
from rackrun.units import plural

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

PLAIN = 0.995  # share of pixels of one brightness from which on an image is nearly empty
SMALLER = 4.0  # times smaller than the median, by the shorter side
LONGER = 3.0  # times wider or higher than the median
FEWEST = 10  # training images of a class
RARE = 20  # times fewer than the median class


class Finding(NamedTuple):
    """A problem of one image, or, without a position, of a class."""

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


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings by problem, the gravest first, and of each the surest first."""
    gravity = {problem: number for number, problem in enumerate(PROBLEMS)}
    return sorted(findings, key=lambda each: (gravity[each.problem], -(each.score or 0.0)))


def unreadable(fingerprints: Fingerprints) -> Iterator[Finding]:
    """Yield images whose bytes are not those of the index, and those that do not decode."""
    for split, prints in fingerprints.by_split.items():
        for row in np.flatnonzero(prints["state"] != SOUND).tolist():
            reason, action = "cannot be decoded", DROP
            if prints["state"][row] != UNDECODED:
                reason = "not the bytes of the index; copy the shard again, or convert it"
                action = UNDECIDED
            position = ImagePosition(split, row)
            yield Finding(DAMAGED, position, fingerprints.label(position), reason, action)


def copied(source: Source, sound: dict[str, np.ndarray]) -> Iterator[Finding]:
    """Yield exact copies among these rows of the indexes, by split.

    Of an image in several splits, that of train goes: what is measured on the others stays.
    """
    manifest = source.manifest
    splits = [
        SplitRows(split, manifest.split(split).shards, source.index(split)[rows])
        for split, rows in sound.items()
    ]
    for group in groups_of_copies(splits, source.read):
        images = {
            ImagePosition(image.split, int(sound[image.split][image.row])): image for image in group
        }
        first, *others = sorted(images, key=_preference)
        labels = defaultdict[str, set[int]](set)
        for image in group:
            labels[image.split].add(image.label)
        for position in (first, *others):
            label, other = images[position].label, first
            problem, action = COPY, DROP
            if position.split != first.split:
                problem = LEAK
            elif len(labels[position.split]) > 1:
                problem, action = TWO_CLASSES, UNDECIDED
                other = next(each for each in images if images[each].label != label)
            elif position == first:
                continue
            key = images[other].name.partition("/")[2]
            reason = f"like {key} in {other.split}"
            if images[other].label != label:
                reason += f", class {manifest.classes[images[other].label]}"
            yield Finding(problem, position, label, reason, action, score=1.0, other=other)


def nearly_copied(
    fingerprints: Fingerprints,
    sound: dict[str, np.ndarray],
    exact: set[ImagePosition],
    workers: int,
) -> Iterator[Finding]:
    """Yield near copies among these rows, but for the images that are exact copies of others."""
    positions = [
        position
        for split, rows in sound.items()
        for row in rows.tolist()
        if (position := ImagePosition(split, row)) not in exact
        and fingerprints.by_split[split]["plain"][row] < PLAIN
    ]
    if len(positions) < 2:
        return
    by_split = defaultdict[str, list[int]](list)
    for position in positions:
        by_split[position.split].append(position.row)
    prints = [fingerprints.by_split[split][rows] for split, rows in by_split.items()]
    pairs = near_pairs(Prints.of(np.concatenate(prints)), workers)
    for kept, copy, pair in _stars(fingerprints, positions, pairs):
        label, score = fingerprints.label(copy), pair.correlation
        kept_label = fingerprints.label(kept)
        problem = NEAR_COPY if kept.split == copy.split else NEAR_LEAK
        same_class = label == kept_label
        named = fingerprints.named(kept)
        reason = f"{'mirror image of' if pair.mirrored else 'like'} {named.key} in {kept.split}"
        if not same_class:
            reason += f", class {fingerprints.source.manifest.classes[kept_label]}"
        action = DROP if same_class else UNDECIDED
        yield Finding(problem, copy, label, reason, action, score=score, other=kept)


def _preference(position: ImagePosition) -> tuple[bool, str, int]:
    # The first of some copies stays: one outside of train, as accuracy is measured on those.
    return position.split == TRAIN, position.split, position.row


def _stars(
    fingerprints: Fingerprints, positions: list[ImagePosition], pairs: list[NearPair]
) -> Iterator[tuple[ImagePosition, ImagePosition, NearPair]]:
    """Yield each image that is near one that is kept, and that one: of two, the larger is kept."""
    near = defaultdict[int, list[tuple[int, NearPair]]](list)
    for pair in pairs:
        near[pair.first].append((pair.second, pair))
        near[pair.second].append((pair.first, pair))

    def preference(number: int) -> tuple[bool, str, int, int, int]:
        position = positions[number]
        row = fingerprints.source.index(position.split)[position.row]
        is_train, split, _ = _preference(position)
        pixels = int(row["width"]) * int(row["height"])
        return is_train, split, -pixels, -int(row["image_length"]), number

    copies: set[int] = set()
    for number in sorted(near, key=preference):
        if number in copies:
            continue
        for other, pair in near[number]:
            if other not in copies and preference(other) > preference(number):
                copies.add(other)
                yield positions[number], positions[other], pair


def odd(fingerprints: Fingerprints) -> Iterator[Finding]:
    """Yield images that are nearly empty, and those of another size or shape than the others."""
    indexes = {split: fingerprints.source.index(split) for split in fingerprints.by_split}
    sizes = np.concatenate([_sizes(index) for index in indexes.values()])
    median_side, median_ratio = np.median(sizes, axis=0) if len(sizes) else (1.0, 0.0)
    for split, index in indexes.items():
        prints = fingerprints.by_split[split]
        sides, ratios = _sizes(index).T
        empty = (prints["state"] == SOUND) & (prints["plain"] >= PLAIN)
        for problem, rows in (
            (EMPTY, empty),
            (ODD_SIZE, sides * SMALLER <= median_side),
            (ODD_SHAPE, np.abs(ratios - median_ratio) >= np.log(LONGER)),
        ):
            for row in np.flatnonzero(rows).tolist():
                reason, action = f"{index['width'][row]} x {index['height'][row]} pixels", UNDECIDED
                if problem == EMPTY:
                    reason = f"{prints['plain'][row]:.1%} of its pixels are alike"
                    action = DROP if prints["plain"][row] == 1 else UNDECIDED
                yield Finding(
                    problem, ImagePosition(split, row), int(index["label"][row]), reason, action
                )


def _sizes(index: np.ndarray) -> np.ndarray:
    """Return the shorter side and the logarithm of width to height: float64 (images, 2)."""
    width, height = (np.maximum(index[name], 1).astype(float) for name in ("width", "height"))
    return np.stack([np.minimum(width, height), np.log(width / height)], axis=1)


def doubtful_classes(source: Source) -> Iterator[Finding]:
    """Yield classes that are small or missing in a split, and those whose names are alike."""
    manifest = source.manifest
    numbers = {name: number for number, name in enumerate(manifest.classes)}
    for first, second in similar(manifest.classes):
        yield Finding(SIMILAR_CLASSES, None, numbers[second], f"alike: {ascii(first)}")
    for split in manifest.splits:
        counts = np.bincount(source.index(split.name)["label"], minlength=len(numbers))
        fewest = 1
        if split.name == TRAIN:
            fewest = max(FEWEST, int(np.median(counts)) // RARE)
        for label in np.flatnonzero(counts < fewest).tolist():
            reason = f"{plural(int(counts[label]), 'image')} in {split.name}"
            yield Finding(SMALL_CLASS, None, label, reason)
