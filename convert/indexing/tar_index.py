"""A tar of another program: where it lies, and what is in it once a process has read it."""

import os
import tempfile
import zlib
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import file_digest
from pathlib import Path, PurePosixPath
from types import MappingProxyType

import numpy as np

from rackrun.atomic import translated_os_errors
from rackrun.convert.images.info import findings, inspect
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
from rackrun.shards.http_source import HttpSource
from rackrun.shards.index import INDEX_FIELDS
from rackrun.terminal import clean
from rackrun.units import plural

LARGEST_TAR = 1 << 38  # bytes of a tar on a server
LARGEST_SAMPLE = 1 << 32  # bytes with all other members: the index has 32 bits for it


@dataclass(frozen=True)
class ForeignTar:
    """A tar that becomes a shard."""

    path: Path
    """Of one on a server, its name only."""
    name: str
    """The name by which the folder has it."""
    split: str
    size: int = 0
    """Bytes."""
    sha256: str = ""
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, INDEX_FIELDS))
    """As in the index, but that a label is a number in `labels`."""
    labels: Sequence[Label] = ()
    keys: Collection[str] = ()
    """Those of all samples, also of such that are left out."""
    findings: Sequence[ImageDefect] = ()


def read_tars(
    tars: Sequence[ForeignTar], url: str, scratch: Path, label_field: str, workers: int
) -> list[ForeignTar]:
    """Read whole tars, side by side, and return them with what is in each.

    Those below a URL are copied into the folder `scratch`, one at a time and without a name.
    """

    def read(tar: ForeignTar) -> ForeignTar:
        working_on(str(tar.path), images=0)
        copy = _copied(url, tar.name, scratch) if url else open_archive(tar.path)
        with reading(tar.path), os.fdopen(copy, "rb") as file:
            contents = _indexed(tar, Tar(tar.path, copy), label_field)
            working_on(str(tar.path), images=0)
            file.seek(0)
            digest = file_digest(file, "sha256").hexdigest()
            return replace(contents, size=os.fstat(copy).st_size, sha256=digest)

    return in_parallel(tars, read, workers, "indexed", None)


def _indexed(tar: ForeignTar, archive: Tar, label_field: str) -> ForeignTar:
    """Read a tar to its end; DataError for a sample that is there twice."""
    rows, found, numbers, keys = [], list[ImageDefect](), dict[Label, int](), set[str]()
    end = 0  # of the last sample: what lies between two samples belongs to the later one
    for sample in samples_in(archive):
        if sample.key in keys:
            raise DataError(
                f"{tar.path}: {sample.key}: is in it twice, not side by side; write the members "
                "of each sample next to one another"
            )
        keys.add(sample.key)
        working_on(f"{tar.path}: {sample.key}")
        image, label = sample.image, label_of(archive, sample, label_field)
        name = f"{tar.path.name}/{sample.key}"
        if image is None or label is None:
            found.append(ImageDefect(name, "no image" if image is None else "unlabelled"))
            continue
        try:
            if image.size > MAX_IMAGE_BYTES or sample.end - end >= LARGEST_SAMPLE:
                raise Defect("too large", f"{image.size:,} bytes")
            data = archive.read(image)
            info = inspect(data, PurePosixPath(image.name).suffix)
        except Defect as defect:
            found.append(ImageDefect(name, defect.kind, defect.detail))
            continue
        found += findings(name, info)
        extents = (end, sample.end - end, image.offset, image.size)
        facts = (info.width, info.height, zlib.crc32(data), info.extension.encode())
        rows.append((0, *extents, numbers.setdefault(label, len(numbers)), *facts))
        end = sample.end
    table = np.array(rows, INDEX_FIELDS)
    return replace(tar, rows=table, labels=tuple(numbers), keys=keys, findings=found)


def _copied(url: str, name: str, scratch: Path) -> int:
    with translated_os_errors(scratch), tempfile.TemporaryFile(dir=scratch) as file:
        for part in HttpSource(url).file(name, LARGEST_TAR):
            file.write(part)
        file.flush()
        return os.dup(file.fileno())


def refuse_duplicates(
    tars: Iterable[ForeignTar],
    stored: Mapping[tuple[str, str], str] = MappingProxyType({}),
    dropped: Container[tuple[str, str]] = (),
) -> None:
    """Raise DataError for a key that two tars of one split have, or one that was dropped.

    `stored`: the shard of each sample that is there already, by split and key.
    """
    places = dict[tuple[str, str], object](stored)
    for tar in tars:
        for key in sorted(tar.keys):
            earlier = places.setdefault((tar.split, key), tar.path)
            if earlier is not tar.path:
                raise DataError(
                    clean(f"{tar.path}: {key}: is in {earlier}, too; tars are taken whole: leave ")
                    + "one of them out, or write it again without that sample"
                )
            if (tar.split, key) in dropped:
                raise DataError(
                    clean(f"{tar.path}: {key}: was dropped by an earlier version; to add ")
                    + "such samples again, add --allow dropped"
                )


def classes_of(
    tars: Iterable[ForeignTar], table: Sequence[str], has_all: bool
) -> tuple[tuple[str, ...], dict[Label, int]]:
    """Return the class table, new classes at its end, and the number of each label in it.

    UsageError for a label beyond a table that has all classes, DataError for a number beyond one of
    names, and for names where classes are numbers.
    """
    labels = set[Label]().union(*(tar.labels for tar in tars))
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
