"""Bytes out of a shard folder, verified: from this machine's disk, or from a server.

    open_source(location) -> Source -> stream(shard): blocks of a whole tar
                                    -> read(shard, offset, length): one range of it
    samples(source, split, number) -> Sample, Sample, ...
    portions(source, wanted) -> the samples of some rows of the index

Every picture is held against its row in the index (key, label, CRC-32), every whole shard against
the digest in the card. Nothing is skipped in silence: what does not fit is a DataError that names
the place, or a sample that carries it, for those who go on without it and count.
"""

import contextlib
import hashlib
import logging
import os
import re
import stat
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rackrun.errors import DataError, Unavailable, UsageError
from shards.index import CARD_NAME, LARGEST_CARD, Card, Row, Shard, Split, largest_index
from shards.metadata import Known
from shards.writer import BLOCK

if TYPE_CHECKING:
    import numpy as np

BLOCK_BYTES = 4 << 20
Stored = bytes | bytearray | memoryview  # bytes of a tar
Range = tuple[Shard, int, int]  # offset and length
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")

log = logging.getLogger(__name__)


class Source(Protocol):
    """Where a shard folder is read from; cheap to pickle and to open again in another process."""

    location: str

    @property
    def card(self) -> Card:
        """The data set card."""

    def index(self, split: str) -> "np.ndarray":
        """The per-sample index of a split, verified against the card."""

    def stream(self, shard: Shard) -> Iterator[Stored]:
        """The bytes of a shard in blocks; DataError at the end if size or digest are wrong."""

    def read(self, shard: Shard, offset: int, length: int) -> Stored:
        """Exactly `length` bytes of a shard from `offset` on."""

    def reads(self, ranges: Iterable[Range]) -> Iterator[Stored]:
        """Each range in turn, while the next ones are on their way."""


@dataclass(frozen=True)
class Sample:
    """One picture as it lies in its shard."""

    key: str
    image: bytes
    extension: str
    label: int
    fault: DataError | None = None
    """Why it cannot be used; then there is no picture."""


def open_source(location: str, cache: str = "", cache_bytes: int = 0) -> Source:
    """The source at a folder's path or an http(s):// URL; anything else is refused.

    With a folder as `cache`, what was read is kept there, up to so many bytes, for all processes.
    """
    if cache:
        from shards.cache import CachedSource

        return CachedSource(open_source(location), cache, cache_bytes)
    if location.startswith(("http://", "https://")):
        from shards.http.source import HttpSource

        return HttpSource(location)
    if SCHEME.match(location):
        raise UsageError(f"{location}: shards are read from a folder or from http(s)://, no more")
    return FolderSource(location)


class FolderSource:
    """A shard folder on a disk of this machine."""

    def __init__(self, location: str) -> None:
        self.location = location
        self._folder = Path(location)
        self._known = Known()

    def __reduce__(self) -> tuple[type["FolderSource"], tuple[str], dict[str, Known]]:
        return FolderSource, (self.location,), {"_known": self._known}

    @property
    def card(self) -> Card:
        """The data set card; UsageError if this is no finished shard folder."""
        if not self._known.card:
            path = self._folder / CARD_NAME
            if not path.exists():
                raise UsageError(self._why_no_card())
            self._known.card = Card.parse(_whole_file(path, LARGEST_CARD), str(path))
        return self._known.card

    def index(self, split: str) -> "np.ndarray":
        """The per-sample index of a split, verified against the card."""
        return self._known.index(self.card, split, self.location, self._index_file)

    def stream(self, shard: Shard) -> Iterator[Stored]:
        """The bytes of a shard in blocks; DataError at the end if size or digest are wrong."""
        path = self._folder / shard.name
        with _opened(path) as file:
            blocks = _blocks(file, path, shard.bytes + 1)
            yield from verified(blocks, shard, str(path))

    def read(self, shard: Shard, offset: int, length: int) -> Stored:
        """Exactly `length` bytes of a shard from `offset` on."""
        path = self._folder / shard.name
        with _opened(path) as file, _reading(path):
            data = os.pread(file, length, offset)
        if len(data) != length:
            raise DataError(f"{path}: ends at byte {offset + len(data)}, not at {shard.bytes}")
        return data

    def reads(self, ranges: Iterable[Range]) -> Iterator[Stored]:
        """Each range in turn; the kernel reads ahead."""
        return (self.read(*wanted) for wanted in ranges)

    def _index_file(self, part: Split) -> bytes:
        return _whole_file(self._folder / part.index, largest_index(part.samples))

    def _why_no_card(self) -> str:
        if not self._folder.is_dir():
            return f"{self.location}: there is no such folder"
        return (
            f"{self.location}: not a finished shard folder ({CARD_NAME} is missing); if a "
            "conversion was interrupted, run the same python -m convert command again"
        )


def samples(source: Source, split: str, number: int) -> Iterator[Sample]:
    """Every sample of one shard in order, each verified, and at the end the whole shard."""
    shard = source.card.split(split).shards[number]
    for row, data in stored_samples(source, split, number):
        yield sample_of(source, shard, row, data)


def portions(
    source: Source, wanted: Iterable[tuple[Shard, "np.ndarray"]]
) -> Iterator[list[Sample]]:
    """Samples portion by portion, while the next portions are on their way.

    A portion is rows of the index that follow one another in a shard, each held against its row.
    What is damaged or missing is a sample with a fault; Unavailable is raised.
    """
    waiting = deque(wanted)
    while waiting:
        reads = source.reads([_range_of(*portion) for portion in waiting])
        try:
            for data in reads:
                shard, rows = waiting.popleft()
                yield _found(source, shard, rows, data)
        except Unavailable:
            raise
        except DataError as error:
            yield [_fault(row, error) for row in waiting.popleft()[1]]


def neighbours(source: Source, shard: Shard, rows: "np.ndarray") -> list[Sample]:
    """The samples of a single portion."""
    try:
        return _found(source, shard, rows, source.read(*_range_of(shard, rows)))
    except Unavailable:
        raise
    except DataError as error:
        return [_fault(row, error) for row in rows]


def _range_of(shard: Shard, rows: "np.ndarray") -> Range:
    start = int(rows[0]["offset"])
    return shard, start, int(rows[-1]["offset"] + rows[-1]["length"]) - start


def _found(source: Source, shard: Shard, rows: "np.ndarray", data: Stored) -> list[Sample]:
    """The samples of a portion; where one is damaged, the portion is asked for once more."""
    found = _held_against(rows, data, f"{source.location}: {shard.name}")
    if not any(sample.fault for sample in found):
        return found
    try:
        data = source.read(*_range_of(shard, rows))
    except Unavailable:
        raise
    except DataError:
        return found
    return _held_against(rows, data, f"{source.location}: {shard.name}")


def _held_against(rows: "np.ndarray", data: Stored, where: str) -> list[Sample]:
    start = int(rows[0]["offset"])
    return [_sample_or_fault(row, data, start, where) for row in rows]


def _sample_or_fault(row: Any, data: Stored, base: int, where: str) -> Sample:
    try:
        return sample_at(row, data, base, where)
    except DataError as error:
        return _fault(row, error)


def _fault(row: Any, error: DataError) -> Sample:
    return Sample(f"the sample at byte {row['offset']}", b"", "", int(row["label"]), error)


def stored_samples(source: Source, split: str, number: int) -> Iterator[tuple[Any, Stored]]:
    """The rows of one shard, each with its bytes of the tar, for `sample_of` to hold together.

    At the end the whole shard is verified; if it is not right it is read once more, as samples are.
    """
    shard = source.card.split(split).shards[number]
    rows = source.index(split)
    blocks = source.stream(shard)
    block = memoryview(b"")
    for row in rows[rows["shard"] == number]:
        length = int(row["length"])
        if len(block) >= length:
            data, block = block[:length], block[length:]
        else:
            data, block = _across(block, blocks, length)
        yield row, data
    try:
        _to_the_end(blocks)
    except Unavailable:
        raise
    except DataError:
        _to_the_end(source.stream(shard))


def _to_the_end(blocks: Iterator[Stored]) -> None:
    """Let length and digest be checked."""
    for _ in blocks:
        pass


def _across(
    rest: memoryview, blocks: Iterator[Stored], length: int
) -> tuple[memoryview, memoryview]:
    """So many bytes from what is left of a block and the next ones, and what is left of those."""
    parts, missing = [rest], length - len(rest)
    while missing:
        block = memoryview(next(blocks))  # which raises where the shard is shorter than its card
        parts.append(block[:missing])
        rest = block[missing:]
        missing -= len(parts[-1])
    return memoryview(b"".join(parts)), rest


def sample_of(source: Source, shard: Shard, row: Any, data: Stored) -> Sample:
    """The sample of an index row out of its bytes; DataError if they are wrong, asked for twice."""
    where, start = f"{source.location}: {shard.name}", int(row["offset"])
    try:
        return sample_at(row, data, start, where)
    except DataError:
        return sample_at(row, source.read(shard, start, int(row["length"])), start, where)


def sample_at(row: Any, data: Stored, base: int, where: str) -> Sample:
    """The sample of an index row out of `data`, which begins at byte `base` of its tar.

    DataError unless both members are what the index says: same key, its label, its picture.
    """
    known = Row(*row.item())
    view = memoryview(data)
    start, image_start = known.offset - base, known.image_offset - base
    image = bytes(view[image_start : image_start + known.image_length])
    if zlib.crc32(image) != known.crc:
        name = _name(view[start : start + BLOCK])
        raise DataError(f"{where}: the picture at byte {known.image_offset} is damaged{name}")
    key, kind = _member(view[start : start + BLOCK], where, known.offset)
    digits = bytes(view[start + BLOCK : start + 2 * BLOCK]).rstrip(b"\0")
    header = view[image_start - BLOCK : image_start]
    named, extension = _member(header, where, known.image_offset - BLOCK)
    if kind != "cls" or named != key or digits != b"%d" % known.label:
        raise DataError(f"{where}: sample {key} at byte {known.offset} differs from its index")
    return Sample(key, image, extension, known.label)


def verified(blocks: Iterator[Stored], shard: Shard, where: str) -> Iterator[Stored]:
    """Pass the blocks of a shard on; DataError at the end if length or digest are wrong."""
    digest, size = hashlib.sha256(), 0
    for block in blocks:
        digest.update(block)
        size += len(block)
        yield block
    if size > shard.bytes:
        raise DataError(f"{where}: longer than the {shard.bytes} bytes that the card says")
    if size != shard.bytes:
        raise DataError(f"{where}: {size} bytes long, and the card says {shard.bytes}")
    if digest.hexdigest() != shard.sha256:
        raise DataError(f"{where}: damaged: its SHA-256 is not the one in the card")


def _member(header: memoryview, where: str, offset: int) -> tuple[str, str]:
    """Stem and extension of the member whose tar header this is."""
    name, dot, extension = bytes(header[:100]).rstrip(b"\0").partition(b".")
    # A header's checksum is the sum of its bytes, with blanks in the checksum's own place. Adler-32
    # has that sum in its lower half, plus one, and takes a hundredth of the time of `sum`.
    blanked = b"".join((header[:148], b" " * 8, header[156:]))
    checksum = (zlib.adler32(blanked) & 0xFFFF) - 1
    if not dot or bytes(header[148:154]) != b"%06o" % checksum:
        raise DataError(f"{where}: byte {offset}: not the header of a sample's member")
    return name.decode("ascii", "replace"), extension.decode("ascii", "replace")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The descriptor of a file; DataError for what is none, such as a pipe that never ends."""
    with _reading(path):
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise DataError(f"{path}: not a file")
        yield file
    finally:
        os.close(file)


def _whole_file(path: Path, most_bytes: int) -> bytes:
    """The bytes of a file; DataError where there are more than that."""
    with _opened(path) as file:
        data = b"".join(_blocks(file, path, most_bytes + 1))
    if len(data) > most_bytes:
        raise DataError(f"{path}: longer than {most_bytes:,} bytes, which is too much for it")
    return data


def _name(header: memoryview) -> str:
    """What a sample is called, for a message, where its first header still says it."""
    try:
        return f" (sample {_member(header, '', 0)[0]})"
    except DataError:
        return ""


def _blocks(descriptor: int, path: Path, most_bytes: int) -> Iterator[bytes]:
    while most_bytes > 0:
        with _reading(path):
            block = os.read(descriptor, min(BLOCK_BYTES, most_bytes))
        if not block:
            return
        most_bytes -= len(block)
        yield block


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what the operating system says about reading `path` into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
