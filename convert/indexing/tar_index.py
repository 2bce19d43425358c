"""A tar of another program: where it lies, and what is in it once a process has read it."""

import os
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import file_digest
from pathlib import Path, PurePosixPath

import numpy as np

from rackrun.convert.images.info import findings_of, inspect
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
from rackrun.shards.index import INDEX_FIELDS
from rackrun.terminal import clean
from rackrun.units import plural

LARGEST_SAMPLE = 1 << 32  # bytes with all other members: the index has 32 bits for it


@dataclass(frozen=True)
class ForeignTar:
    """A tar that becomes a shard."""

    path: Path
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


def read_tars(tars: Sequence[ForeignTar], label_field: str, workers: int) -> list[ForeignTar]:
    """Read whole tars, side by side, and return them with what is in each."""

    def read(tar: ForeignTar) -> ForeignTar:
        working_on(str(tar.path), images=0)
        descriptor = open_archive(tar.path)
        with reading(tar.path), os.fdopen(descriptor, "rb") as file:
            contents = _indexed(tar, Tar(tar.path, descriptor), label_field)
            working_on(str(tar.path), images=0)
            digest = file_digest(file, "sha256").hexdigest()
            return replace(contents, size=os.fstat(descriptor).st_size, sha256=digest)

    return in_parallel(tars, read, workers, "indexed", None)


def _indexed(tar: ForeignTar, archive: Tar, label_field: str) -> ForeignTar:
    """Read a tar to its end; DataError for a sample that is there twice."""
    rows, findings, numbers, keys = [], list[ImageDefect](), dict[Label, int](), set[str]()
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
            findings.append(ImageDefect(name, "no image" if image is None else "unlabeled"))
            continue
        try:
            if image.size > MAX_IMAGE_BYTES or sample.end - end >= LARGEST_SAMPLE:
                raise Defect("too large", f"{image.size:,} bytes")
            data = archive.read(image)
            info = inspect(data, PurePosixPath(image.name).suffix)
        except Defect as defect:
            findings.append(ImageDefect(name, defect.kind, defect.detail))
            continue
        findings += findings_of(name, info)
        extents = (end, sample.end - end, image.offset, image.size)
        facts = (info.width, info.height, zlib.crc32(data), info.extension.encode())
        rows.append((0, *extents, numbers.setdefault(label, len(numbers)), *facts))
        end = sample.end
    table = np.array(rows, INDEX_FIELDS)
    return replace(tar, rows=table, labels=tuple(numbers), keys=keys, findings=findings)


def refuse_duplicates(tars: Iterable[ForeignTar]) -> None:
    """Raise DataError for a key that two tars of one split have."""
    places = dict[tuple[str, str], Path]()
    for tar in tars:
        for key in sorted(tar.keys):
            earlier = places.setdefault((tar.split, key), tar.path)
            if earlier is not tar.path:
                raise DataError(
                    clean(f"{tar.path}: {key}: is in {earlier}, too; tars are taken whole: leave ")
                    + "one of them out, or write it again without that sample"
                )


def classes_of(
    tars: Iterable[ForeignTar], named: tuple[str, ...]
) -> tuple[tuple[str, ...], dict[Label, int]]:
    """Return the classes, and the number of each label; `named` are those of --classes, if any.

    UsageError for a label that is none of those, DataError for numbers beside names without them.
    """
    labels = set[Label]().union(*(tar.labels for tar in tars))
    texts = sorted(label for label in labels if isinstance(label, str))
    count = max((label for label in labels if isinstance(label, int)), default=-1) + 1
    classes = named or tuple(texts) or tuple(map(str, range(count)))
    if named and count > len(named):
        what = f"a sample has class {count - 1}, and there are {plural(len(named), 'name')}"
        raise UsageError(f"--classes: {what}")
    if unknown := [text for text in texts if text not in classes]:
        raise UsageError(f"--classes: no {unknown[0]!r} in it, which is the class of a sample")
    if texts and count and not named:
        raise DataError(
            f"some samples have a number as their class ({count - 1}), others a name "
            f"({texts[0]!r}); index them separately"
        )
    by_name: dict[Label, int] = {name: number for number, name in enumerate(classes)}
    return classes, by_name | {number: number for number in range(len(classes))}
