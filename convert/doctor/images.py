"""What cleanvision finds among the images of a shard folder.

index -> Images -> cleanvision -> its sets of copies and its marks on single images -> Finding
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from rackrun.convert.readers.records import TRAIN
from rackrun.errors import DataError, Unavailable
from rackrun.shards.images import FORMATS, MAX_SCANS, UNDECODABLE, scans, too_large
from rackrun.shards.index import Shard
from rackrun.shards.resize import in_mode
from rackrun.shards.samples import Sample, sample_in_row
from rackrun.shards.source import Source
from rackrun.terminal import say

DROP, RELABEL, UNDECIDED = "drop", "relabel", ""
"""What a row of doctor.csv asks for; UNDECIDED: nothing, until a person has looked at it."""

LABEL = "label"
PROBLEMS = {
    "leak": "the same image in another split: results there look too good",
    "two classes": "the same image in two classes: one of the labels is wrong",
    LABEL: "a model that was not fitted to the image is confident of another class",
    "copy": "the same image twice in a class of a split",
    "near leak": "looks like an image in another split",
    "near copy": "looks like an image in the same split",
    "damaged": "cannot be read, or not be decoded",
    "low information": "nearly empty",
    "odd size": "much smaller or larger than the others",
    "odd aspect ratio": "much wider or higher than the others",
    "dark": "hardly any light",
    "light": "hardly any dark",
    "blurry": "without sharp edges",
    "grayscale": "without color",
}
"""Every problem, the gravest first, and what it means."""


class Finding(NamedTuple):
    """A problem of one image, by its number among all images."""

    problem: str
    image: int
    action: str
    reason: str
    score: float
    """How sure it is, 0 to 1."""
    new_class: str = ""
    other: int | None = None
    """The image that this one is like."""


class Images:
    """The images of all splits by number; cleanvision takes it for a dataset of torchvision."""

    def __init__(self, source: Source) -> None:
        """Read the indexes."""
        self.source = source
        splits = [each.name for each in source.manifest.splits]
        self._rows = [(split, row) for split in splits for row in range(len(source.index(split)))]
        self.damaged: dict[int, str] = {}
        """What is wrong with images that were asked for, by number."""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._rows)

    def split(self, number: int) -> str:
        """Return the split of an image."""
        return self._rows[number][0]

    def label(self, number: int) -> int:
        """Return the number of an image's class."""
        return int(self._shard_and_row(number)[1]["label"])

    def shard(self, number: int) -> str:
        """Return the file name of an image's shard."""
        return self._shard_and_row(number)[0].name

    def sample(self, number: int) -> Sample:
        """Return an image as stored; DataError if it is damaged."""
        return sample_in_row(self.source, *self._rows[number])

    def labeled(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield number, label and stored bytes of each image whose bytes are right."""
        for number in range(len(self)):
            try:
                yield number, self.label(number), self.sample(number).image
            except Unavailable:
                raise
            except DataError:
                continue

    def key(self, number: int) -> str:
        """Return the key of an image, or where one is that is damaged."""
        try:
            return self.sample(number).key
        except DataError:
            return f"the sample at byte {self._shard_and_row(number)[1]['offset']}"

    def _shard_and_row(self, number: int) -> tuple[Shard, Any]:
        split, position = self._rows[number]
        row = self.source.index(split)[position]
        return self.source.manifest.split(split).shards[int(row["shard"])], row

    def __getitem__(self, number: int) -> tuple[Image.Image, int]:
        """Return an image, gray or RGB, with its label; of a damaged one, a single pixel."""
        try:
            return decoded(self.sample(number).image), self.label(number)
        except Unavailable:
            raise
        except DataError:
            self.damaged[number] = "not the bytes of the index; copy the shard again, or convert it"
        except (*UNDECODABLE, Image.DecompressionBombError):
            self.damaged[number] = "cannot be decoded"
        return Image.new("L", (1, 1)), self.label(number)


def decoded(data: bytes) -> Image.Image:
    """Return an image of the formats and sizes that are read, gray or RGB."""
    with warnings.catch_warnings(action="ignore"):
        image = Image.open(io.BytesIO(data), formats=tuple(FORMATS))
        if too_large(*image.size) or (image.format == "JPEG" and scans(data) > MAX_SCANS):
            raise ValueError("larger than the limits for reading")
        image.load()
    return image if image.mode == "L" else in_mode(image, "RGB")


def examined(images: Images) -> Iterator[Finding]:
    """Yield what cleanvision finds, and what cannot be read."""
    from cleanvision import Imagelab

    lab = Imagelab(torchvision_dataset=images, verbose=False)
    lab.find_issues(verbose=False)
    for number, reason in images.damaged.items():
        action = DROP if reason == "cannot be decoded" else UNDECIDED
        yield Finding("damaged", number, action, reason, 1.0)
    for near, sets in ((False, "exact_duplicates"), (True, "near_duplicates")):
        for group in lab.info[sets]["sets"]:
            yield from _copies(images, set(group) - images.damaged.keys(), near)
    for problem in PROBLEMS:
        name = problem.replace(" ", "_")
        if f"is_{name}_issue" not in lab.issues:
            continue
        marked = np.flatnonzero(lab.issues[f"is_{name}_issue"])
        if len(marked) > len(images) / 2:
            say(f"{problem}: {len(marked):,} of {len(images):,} images, so this set is like that")
            continue
        for number in marked.tolist():
            if number not in images.damaged:
                score = 1 - float(lab.issues[f"{name}_score"][number])
                yield Finding(problem, number, UNDECIDED, PROBLEMS[problem], score)


def _copies(images: Images, group: Iterable[int], near: bool) -> Iterator[Finding]:
    """Yield all but one of some images that are alike; the one that stays is not of train."""
    alike = sorted(group, key=lambda each: (images.split(each) == TRAIN, each))
    classes = images.source.manifest.classes
    for image in alike[1:]:
        first = alike[0]
        same_class = images.label(image) == images.label(first)
        leaks = images.split(image) != images.split(first)
        problem, action = "leak" if leaks else "copy", DROP
        if near:
            problem, action = f"near {problem}", UNDECIDED
        elif not (leaks or same_class):
            problem, action = "two classes", UNDECIDED
        reason = f"like {images.key(first)} in {images.split(first)}"
        if not same_class:
            reason += f", class {classes[images.label(first)]}"
        yield Finding(problem, image, action, reason, 1.0, other=first)
