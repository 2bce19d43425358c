"""The small files that come with ImageNet: labels of images, names of classes.

The development kit, packed or not, has them in MATLAB's format, under numbers of its own; Kaggle's
two tables have them as text. None of them is believed: a file may cost no more than LARGEST, and
what does not fit its form is a DataError in one line.
"""

import csv
import gzip
import io
import os
import re
import tarfile
import zlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path, PurePosixPath

from rackrun.convert.readers.matlab import NotMatlab, Value, structs
from rackrun.convert.readers.records import opened, reading
from rackrun.errors import DataError, UsageError

DEVKIT = "ILSVRC2012_devkit_t12"
META, GROUND_TRUTH = "meta.mat", "ILSVRC2012_validation_ground_truth.txt"
SOLUTION, MAPPING = "LOC_val_solution.csv", "LOC_synset_mapping.txt"
LARGEST = 64 << 20  # bytes of a small file, and of the unpacked devkit: the true ones have 3 MB
LARGEST_META = 16 << 20

WNID = re.compile(r"n[0-9]{8}")
VAL_NUMBER = re.compile(r"ILSVRC2012_val_([0-9]{8})")


ReadText = Callable[[str], bytes | None]
"""Returns a small file that belongs to the data set, by its bare name; None if there is none."""


class Truth:
    """The class of each validation image and the names of classes, from the small files."""

    def __init__(self, read: ReadText) -> None:
        self._read = read

    def wnid(self, stem: str) -> str:
        """Return the class of a validation image that does not lie in a folder of its class."""
        if self._solution is not None:
            wnid = self._solution.get(stem)
        else:
            number = VAL_NUMBER.fullmatch(stem)
            wnid = self._ground_truth.get(int(number[1])) if number else None
        if wnid is None:
            raise DataError(f"{stem}: the ground truth has no class for this image")
        return wnid

    def names(self) -> dict[str, str]:
        """Return the name of each wnid that a file has one for."""
        mapping = self._read(MAPPING)
        if mapping is None:
            return dict(self._synsets.values()) if META in self._devkit else {}
        return mapped(mapping)

    @cached_property
    def _solution(self) -> dict[str, str] | None:
        data = self._read(SOLUTION)
        return None if data is None else solved(data)

    @cached_property
    def _ground_truth(self) -> dict[int, str]:
        if len(self._devkit) < 2:
            raise UsageError(
                f"the classes of the validation images are not known: put {DEVKIT}.tar.gz (or "
                f"Kaggle's {SOLUTION}) beside them"
            )
        return numbered(self._devkit[GROUND_TRUTH], self._synsets)

    @cached_property
    def _synsets(self) -> dict[int, tuple[str, str]]:
        return synsets(self._devkit[META])

    @cached_property
    def _devkit(self) -> dict[str, bytes]:
        files = {name: self._read(name) for name in (META, GROUND_TRUTH)}
        return {name: data for name, data in files.items() if data is not None}


def solved(data: bytes) -> dict[str, str]:
    """Return Kaggle's table: image to wnid, the first field of the prediction string."""
    rows = csv.reader(io.StringIO(_decoded(data, SOLUTION), newline=""))
    try:
        header = next(rows, [])
        if header[:2] != ["ImageId", "PredictionString"]:
            raise DataError(f"{SOLUTION}: does not begin with ImageId,PredictionString")
        wnids = {}
        for number, row in enumerate(rows, 2):
            wnid = row[1].split(" ", 1)[0] if len(row) > 1 else ""
            if row and not WNID.fullmatch(wnid):
                raise DataError(f"{SOLUTION}: row {number} does not name an image and its class")
            if row:
                wnids[row[0]] = wnid
        return wnids
    except csv.Error as error:
        raise DataError(f"{SOLUTION}: line {rows.line_num}: {error}") from None


def mapped(data: bytes) -> dict[str, str]:
    """Return Kaggle's names: a line per class, its wnid and its description."""
    pairs = [line.partition(" ") for line in _decoded(data, MAPPING).splitlines() if line]
    wnids = [wnid for wnid, _, _ in pairs]
    if wnids != sorted(set(wnids)):
        raise DataError(f"{MAPPING}: its classes are not in the order of their wnids")
    return {wnid: description for wnid, _, description in pairs}


def synsets(data: bytes) -> dict[int, tuple[str, str]]:
    """Return the devkit's numbers of the leaves (1 to 1000) to wnid and description."""
    try:
        leaves = {}
        for row in structs(data, "synsets", LARGEST_META):
            if _whole(row, "num_children"):  # what is above the classes in WordNet
                continue
            wnid, words = row.get("WNID"), row.get("words")
            if not isinstance(wnid, str) or not WNID.fullmatch(wnid) or not isinstance(words, str):
                raise NotMatlab("a class without its wnid or its words")
            leaves[_whole(row, "ILSVRC2012_ID")] = wnid, words
        return leaves
    except NotMatlab as error:
        raise DataError(f"{META} of the devkit cannot be read: {error}") from None


def numbered(data: bytes, classes: dict[int, tuple[str, str]]) -> dict[int, str]:
    """Return the devkit's ground truth: the position of an image, from 1, to its wnid."""
    wnids = {b"%d" % number: wnid for number, (wnid, _) in classes.items()}
    wnids_by_position = {}
    for position, line in enumerate(data.split(), 1):
        if line not in wnids:
            raise DataError(f"{GROUND_TRUTH}: number {position} is not that of a class in {META}")
        wnids_by_position[position] = wnids[line]
    return wnids_by_position


def beside(root: Path, name: str) -> bytes | None:
    """Return a small file in the root, or of the devkit, packed or unpacked."""
    for path in (root / name, root / DEVKIT / "data" / name):
        if path.is_file():
            with reading(path), os.fdopen(opened(path), "rb") as file:
                return _small(file.read(LARGEST + 1), str(path))
    packed = root / f"{DEVKIT}.tar.gz"
    return _packed(packed, name) if packed.is_file() else None


def _packed(path: Path, name: str) -> bytes | None:
    with reading(path), os.fdopen(opened(path), "rb") as file:
        try:
            data = gzip.GzipFile(fileobj=file).read(LARGEST + 1)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path}: cannot be unpacked: {error}") from None
    try:
        with tarfile.open(fileobj=io.BytesIO(_small(data, str(path)))) as tar:
            for member in tar:
                content = tar.extractfile(member)
                if content and PurePosixPath(member.name).name == name:
                    return content.read()
    except tarfile.TarError as error:
        raise DataError(f"{path}: cannot be unpacked: {error}") from None
    return None


def _small(data: bytes, where: str) -> bytes:
    if len(data) > LARGEST:
        raise DataError(f"{where}: over {LARGEST >> 20} MiB, where the true one has 3")
    return data


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8 at byte {error.start:,}; download it again") from None


def _whole(row: dict[str, Value], name: str) -> int:
    value = row.get(name)
    if not isinstance(value, int | float) or value != value // 1:
        raise NotMatlab(f"{name} is no whole number")
    return int(value)
