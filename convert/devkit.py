"""The classes of ImageNet-1k, and the small files that come with it: labels of validation images.

The development kit, packed or not, has them under numbers of its own, which `synsets.txt` lists by
line, each with its wnid and its words in WordNet; Kaggle's table has them as wnids. No file is
trusted: it may have at most LARGEST bytes, and one of another form is a DataError in one line.
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

from rackrun.convert.readers.records import opened, reading
from rackrun.errors import DataError, UsageError

DEVKIT = "ILSVRC2012_devkit_t12"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
SOLUTION = "LOC_val_solution.csv"
SYNSETS = Path(__file__).with_name("synsets.txt")
LARGEST = 64 << 20  # bytes of a small file, and of the unpacked devkit: the true ones have 3 MB

WNID = re.compile(r"n[0-9]{8}")
VAL_NUMBER = re.compile(r"ILSVRC2012_val_([0-9]{8})")


ReadText = Callable[[str], bytes | None]
"""Returns a small file that belongs to the data set, by its bare name; None if there is none."""


def words() -> dict[str, str]:
    """Return the words of each class by its wnid, in the order of the devkit's numbers from 1."""
    pairs = (line.split(" ", 1) for line in SYNSETS.read_text(encoding="utf-8").splitlines())
    return dict(pairs)


class Truth:
    """The class of each validation image, from the small files."""

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

    @cached_property
    def _solution(self) -> dict[str, str] | None:
        data = self._read(SOLUTION)
        return None if data is None else solved(data)

    @cached_property
    def _ground_truth(self) -> dict[int, str]:
        data = self._read(GROUND_TRUTH)
        if data is None:
            raise UsageError(
                f"the classes of the validation images are not known: put {DEVKIT}.tar.gz (or "
                f"Kaggle's {SOLUTION}) beside them"
            )
        return numbered(data)


def solved(data: bytes) -> dict[str, str]:
    """Return Kaggle's table: image to wnid, the first field of the prediction string."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        where = f"{SOLUTION}: not UTF-8 at byte {error.start:,}"
        raise DataError(f"{where}; download it again") from None
    rows = csv.reader(io.StringIO(text, newline=""))
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


def numbered(data: bytes) -> dict[int, str]:
    """Return the devkit's ground truth: the position of an image, from 1, to its wnid."""
    wnids = {b"%d" % number: wnid for number, wnid in enumerate(words(), 1)}
    wnids_by_position = {}
    for position, line in enumerate(data.split(), 1):
        if line not in wnids:
            raise DataError(f"{GROUND_TRUTH}: number {position} is not that of a class, 1 to 1,000")
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
        with tarfile.open(fileobj=io.BytesIO(_small(data, str(path))), mode="r:") as tar:
            for member in tar:
                if member.isreg() and PurePosixPath(member.name).name == name:
                    content = tar.extractfile(member)
                    assert content
                    return _small(content.read(LARGEST + 1), f"{path}: {name}")
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"{path}: cannot be unpacked: {error}") from None
    return None


def _small(data: bytes, where: str) -> bytes:
    if len(data) > LARGEST:
        raise DataError(f"{where}: over {LARGEST >> 20} MiB, where the true one has 3")
    return data
