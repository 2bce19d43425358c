"""The work of one process: a tar in, its rows of the index out."""

import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import blake2b, file_digest
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from convert.images.info import findings, inspect
from convert.indexing.tar_listing import TarListing
from convert.packing.workers import in_parallel, working_on
from convert.progress import Progress, meter
from convert.readers.names import refuse_similar
from convert.readers.records import MAX_IMAGE_BYTES, Defect, ImageDefect, open_archive, reading
from convert.readers.tars import Tar, TarMember
from convert.readers.webdataset_tars import Label, TarSample, label_of, samples_in
from convert.readers.zips import nameless_file
from rackrun.atomic import translated_os_errors
from rackrun.errors import DataError, UsageError
from shards.index import PACKED_ROW, Row

LARGEST_TAR = 1 << 38  # bytes of a tar on a server
LARGEST_SAMPLE = 1 << 32  # bytes with all other members: the index has 32 bits for it


class IndexJob(NamedTuple):
    """A tar to index: a file, or what `name` is on the server at `url`."""

    number: int
    path: Path
    name: str
    url: str
    scratch: Path
    """Folder that a tar from a server is copied into, one at a time, without a name."""
    label_field: str


@dataclass
class TarIndex:
    """The samples of a tar."""

    number: int
    size: int = 0
    """In bytes."""
    sha256: str = ""
    samples: int = 0
    rows: bytes = b""
    """As in the index, but that a label is a number in `labels`."""
    labels: list[Label] = field(default_factory=list)
    keys: dict[bytes, str] = field(default_factory=dict)
    """The hash of each sample's key, and the key."""
    findings: list[ImageDefect] = field(default_factory=list)


def index_tar(job: IndexJob, report: Callable[[TarIndex], None]) -> None:
    """Read a whole tar and report what is in it."""
    working_on(str(job.path))
    descriptor = _copied(job) if job.url else open_archive(job.path)
    with reading(job.path), os.fdopen(descriptor, "rb") as file:
        tar = Tar(Path(job.name) if job.url else job.path, descriptor)
        contents = TarIndex(job.number, os.fstat(descriptor).st_size)
        _Indexer(tar, contents, job.label_field).run()
        working_on(str(job.path))
        file.seek(0)
        contents.sha256 = file_digest(file, "sha256").hexdigest()
    report(contents)


def index_tars(
    listing: TarListing, scratch: Path, label_field: str, workers: int
) -> list[TarIndex]:
    """Return the contents of each tar, in their order, read side by side."""
    jobs = [
        IndexJob(number, tar.path, tar.name, listing.url, scratch, label_field)
        for number, tar in enumerate(listing.tars)
    ]
    indexed: dict[int, TarIndex] = {}
    steps = in_parallel(jobs, index_tar, workers)
    with closing(steps), meter("indexed", len(jobs), "tars") as shown:
        for result in steps:
            indexed[result.number] = result
            shown.advance(Progress(1, result.size))
    return [indexed[number] for number in range(len(jobs))]


class _Indexer:
    """Fills a TarIndex from its tar."""

    def __init__(self, tar: Tar, contents: TarIndex, label_field: str) -> None:
        self._tar, self._contents, self._label_field = tar, contents, label_field
        self._rows = bytearray()
        self._numbers: dict[Label, int] = {}
        self._end = 0  # of the last sample: what lies between two samples belongs to the later one

    def run(self) -> None:
        """Read the tar to its end; DataError for a sample that is there twice."""
        for sample in samples_in(self._tar):
            mark = blake2b(sample.key.encode(), digest_size=8).digest()
            if mark in self._contents.keys:
                raise DataError(
                    f"{self._tar.path}: {sample.key}: is in there twice, not side by side; write "
                    "the members of each sample next to one another"
                )
            self._contents.keys[mark] = sample.key
            working_on(f"{self._tar.path}: {sample.key}")
            self._add(sample)
        self._contents.rows = bytes(self._rows)
        self._contents.labels = list(self._numbers)

    def _add(self, sample: TarSample) -> None:
        image, label = sample.image, label_of(self._tar, sample, self._label_field)
        name = f"{self._tar.path.name}/{sample.key}"
        if image is None or label is None:
            kind = "no image" if image is None else "unlabelled"
            self._contents.findings.append(ImageDefect(name, kind))
            return
        try:
            row = self._row(sample, image)
        except Defect as defect:
            self._contents.findings.append(ImageDefect(name, defect.kind, defect.detail))
            return
        row = row._replace(label=self._numbers.setdefault(label, len(self._numbers)))
        self._rows += PACKED_ROW.pack(*row)
        self._contents.samples += 1
        self._end = sample.end

    def _row(self, sample: TarSample, image: TarMember) -> Row:
        if image.size > MAX_IMAGE_BYTES or sample.end - self._end >= LARGEST_SAMPLE:
            raise Defect("too large", f"{image.size:,} bytes")
        data = self._tar.content(image)
        info = inspect(data, PurePosixPath(image.name).suffix)
        self._contents.findings += findings(f"{self._tar.path.name}/{sample.key}", info)
        extents = (self._end, sample.end - self._end, image.offset, image.size)
        facts = (info.width, info.height, zlib.crc32(data), info.extension.encode())
        return Row(0, *extents, 0, *facts)


def _copied(job: IndexJob) -> int:
    """Copy a tar from its server to a file that is gone when its descriptor is closed."""
    from shards.http.source import HttpSource

    descriptor = nameless_file(job.scratch)
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        for part in HttpSource(job.url).file(job.name, LARGEST_TAR):
            with translated_os_errors(job.scratch):
                file.write(part)
    return descriptor


def classes_of(
    indexed: Sequence[TarIndex], names: tuple[str, ...] | None, may_be_similar: bool
) -> tuple[tuple[str, ...], dict[int | str, int]]:
    """Return the class table, and the number of each label in it."""
    labels = set[int | str]().union(*(each.labels for each in indexed))
    texts = sorted(label for label in labels if isinstance(label, str))
    numbers = [label for label in labels if isinstance(label, int)]
    if texts and numbers:
        raise DataError(
            f"some samples have a number as their class ({numbers[0]}), others a name "
            f"({texts[0]!r}); index them apart"
        )
    if numbers:
        count = max(numbers) + 1
        if names is not None and len(names) < count:
            raise UsageError(f"--classes: {len(names)} names, and a sample has class {count - 1}")
        table = names or tuple(map(str, range(count)))
        return table, {number: number for number in numbers}
    table = tuple(texts) if names is None else names
    if not may_be_similar:
        refuse_similar(table)
    unknown = sorted(set(texts) - set(table))
    if unknown:
        raise UsageError(f"--classes: no {unknown[0]!r} in it, which is the class of a sample")
    return table, {name: number for number, name in enumerate(table)}
