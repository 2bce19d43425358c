"""The work of one process: a tar in, its rows of the index out."""

import os
import tempfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import file_digest
from pathlib import Path, PurePosixPath
from types import MappingProxyType

import numpy as np

from rackrun.atomic import translated_os_errors
from rackrun.convert.images.info import findings, inspect
from rackrun.convert.indexing.tar_listing import ListedTar, TarListing
from rackrun.convert.packing.workers import in_parallel, working_on
from rackrun.convert.readers.records import (
    MAX_IMAGE_BYTES,
    Defect,
    ImageDefect,
    open_archive,
    reading,
)
from rackrun.convert.readers.tars import Tar
from rackrun.convert.readers.webdataset_tars import Label, label_of, samples_in
from rackrun.errors import DataError, UsageError
from rackrun.shards.index import INDEX_FIELDS, Row
from rackrun.terminal import clean
from rackrun.units import plural

LARGEST_TAR = 1 << 38  # bytes of a tar on a server
LARGEST_SAMPLE = 1 << 32  # bytes with all other members: the index has 32 bits for it


@dataclass
class TarIndex:
    """The samples of a tar."""

    size: int
    """Bytes."""
    sha256: str = ""
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, INDEX_FIELDS))
    """As in the index, but that a label is a number in `labels`."""
    labels: list[Label] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    """Those of all samples, also of such that are left out."""
    findings: list[ImageDefect] = field(default_factory=list)

    def counts(self) -> Counter[Label]:
        """Return the number of samples of each label."""
        counts = np.bincount(self.rows["label"], minlength=len(self.labels)).tolist()
        return Counter(dict(zip(self.labels, counts, strict=True)))


def index_tars(
    listing: TarListing, scratch: Path, label_field: str, workers: int
) -> list[TarIndex]:
    """Read the whole tars, side by side, and return what is in each, in their order.

    Tars of a server are copied into the folder `scratch`, one at a time and without a name.
    """

    def index(tar: ListedTar) -> TarIndex:
        working_on(str(tar.path), images=0)
        copy = _copied(listing.url, tar.name, scratch) if listing.url else open_archive(tar.path)
        with reading(tar.path), os.fdopen(copy, "rb") as file:
            archive = Tar(Path(tar.name) if listing.url else tar.path, copy)
            contents = _indexed(archive, os.fstat(copy).st_size, label_field)
            working_on(str(tar.path), images=0)
            file.seek(0)
            contents.sha256 = file_digest(file, "sha256").hexdigest()
        return contents

    return in_parallel(listing.tars, index, workers, "indexed", None)


def _indexed(tar: Tar, size: int, label_field: str) -> TarIndex:
    """Read a tar to its end; DataError for a sample that is there twice."""
    contents, rows, numbers = TarIndex(size), list[Row](), dict[Label, int]()
    end = 0  # of the last sample: what lies between two samples belongs to the later one
    for sample in samples_in(tar):
        if sample.key in contents.keys:
            raise DataError(
                f"{tar.path}: {sample.key}: is in it twice, not side by side; write the members "
                "of each sample next to one another"
            )
        contents.keys.add(sample.key)
        working_on(f"{tar.path}: {sample.key}")
        image, label = sample.image, label_of(tar, sample, label_field)
        name = f"{tar.path.name}/{sample.key}"
        if image is None or label is None:
            kind = "no image" if image is None else "unlabelled"
            contents.findings.append(ImageDefect(name, kind))
            continue
        try:
            if image.size > MAX_IMAGE_BYTES or sample.end - end >= LARGEST_SAMPLE:
                raise Defect("too large", f"{image.size:,} bytes")
            data = tar.read(image)
            info = inspect(data, PurePosixPath(image.name).suffix)
        except Defect as defect:
            contents.findings.append(ImageDefect(name, defect.kind, defect.detail))
            continue
        contents.findings += findings(name, info)
        extents = (end, sample.end - end, image.offset, image.size)
        facts = (info.width, info.height, zlib.crc32(data), info.extension.encode())
        rows.append(Row(0, *extents, numbers.setdefault(label, len(numbers)), *facts))
        end = sample.end
    contents.rows, contents.labels = np.array(rows, INDEX_FIELDS), list(numbers)
    return contents


def _copied(url: str, name: str, scratch: Path) -> int:
    from rackrun.shards.http_source import HttpSource

    with translated_os_errors(scratch), tempfile.TemporaryFile(dir=scratch) as file:
        for part in HttpSource(url).file(name, LARGEST_TAR):
            file.write(part)
        file.flush()
        return os.dup(file.fileno())


def refuse_duplicates(
    listing: TarListing,
    indexed: Sequence[TarIndex],
    stored: Mapping[tuple[str, str], str] = MappingProxyType({}),
) -> None:
    """Raise DataError for a key that two tars of one split have.

    `stored`: the shard of each sample that is there already, by split and key.
    """
    places = dict[tuple[str, str], object](stored)
    for tar, contents in zip(listing.tars, indexed, strict=True):
        for key in sorted(contents.keys):
            earlier = places.setdefault((tar.split, key), tar.path)
            if earlier is not tar.path:
                raise DataError(
                    clean(f"{tar.path}: {key}: is in {earlier}, too; tars are taken whole: leave ")
                    + "one of them out, or write it again without that sample"
                )


def classes_of(
    indexed: Sequence[TarIndex], table: Sequence[str], has_all: bool
) -> tuple[tuple[str, ...], dict[Label, int]]:
    """Return the class table, new classes at its end, and the number of each label in it.

    UsageError for a label beyond a table that has all classes, DataError for a number beyond one of
    names, and for names where classes are numbers.
    """
    labels = set[Label]().union(*(each.labels for each in indexed))
    texts = sorted(label for label in labels if isinstance(label, str))
    numbers = sorted(label for label in labels if isinstance(label, int))
    are_numbers = [*table] == [*map(str, range(len(table)))]  # so is an empty table
    if texts and are_numbers and (table or numbers):
        raise DataError(
            f"some samples have a number as their class ({min(numbers, default=0)}), others a name "
            f"({texts[0]!r}); index them separately"
        )
    refused = UsageError if has_all else DataError
    count = max(numbers, default=-1) + 1
    if count > len(table) and (has_all or not are_numbers):
        named = f"a sample has class {count - 1}, and there are {plural(len(table), 'name')}"
        raise refused(f"{named}; index all tars with --classes FILE --force, which names it, too")
    more = [*map(str, range(len(table), count))] if are_numbers and not texts else texts
    if has_all and (unknown := [text for text in texts if text not in table]):
        raise refused(f"--classes: no {unknown[0]!r} in it, which is the class of a sample")
    grown = tuple(dict.fromkeys((*table, *more)))
    by_name: dict[Label, int] = {name: number for number, name in enumerate(grown)}
    return grown, by_name | {number: number for number in range(len(grown))}
