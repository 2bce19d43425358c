"""Samples of tars without an index: neighboring members with one key, an image and its class.

Nothing says how many samples a tar should have, or which bytes. A tar that is cut short, or whose
headers are damaged, is noticed by its end; an image that is damaged, if it cannot be decoded.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from rackrun.errors import DataError
from rackrun.shards.class_names import LABEL_FIELD, MOST_LABEL_BYTES, label_in, number_in
from rackrun.shards.samples import Sample, is_meta, key_and_suffix
from rackrun.shards.tar_streams import Stream, opened
from rackrun.terminal import clean, one_line
from rackrun.training.data.samples import StoredSample

NOT_VERIFIED = (
    "no index: tars that are cut short and images that do not decode are noticed, other changed"
    " bytes and missing images are not; an index, which convert index makes, verifies each image"
)
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")
LABELS = (".cls", ".json")  # here a .txt is a caption, or describes the tar
MOST_BYTES = {**dict.fromkeys(IMAGES, 128 << 20), **dict.fromkeys(LABELS, MOST_LABEL_BYTES)}
"""Suffix of a member -> most bytes that it may have."""
BLOCK = 512
READ_BYTES = 128 * BLOCK  # at once
MOST_HEADER_BYTES = 1 << 20  # before a member, with the long names and attributes of pax


@dataclass(frozen=True)
class Labels:
    """How samples name their classes."""

    classes: tuple[str, ...]
    field: str = LABEL_FIELD
    """The field of a .json that holds the class."""

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.classes)}

    def number(self, members: dict[str, bytes], where: str) -> int:
        """Return the class of a sample by its .cls, else its .json; DataError if it has none."""
        suffix = next((each for each in LABELS if each in members), "")
        if not suffix:
            raise DataError(clean(f"{where}: neither a .cls nor a .json, so no class"))
        label = label_in(suffix, members[suffix], self.field, f"{where}{suffix}")
        number = self._numbers.get(label, number_in(label))
        if number is None or number >= len(self.classes):
            raise DataError(
                clean(f"{where}: {label[:60]!r} is none of {len(self.classes):,} classes")
            )
        return number


class TarPart(NamedTuple):
    """Samples of a tar for one of several readers: from one on, each so-many-th."""

    tar: str
    first: int = 0
    every: int = 1


def part_of(parts: Sequence[TarPart], number: int, readers: int) -> list[TarPart]:
    """Return what one of several readers reads, so that all together read each sample once.

    Where there are fewer parts than readers, several read one tar and take samples in turn.
    """
    if len(parts) >= readers or not parts:
        return list(parts[number::readers])
    which = number % len(parts)
    tar, first, every = parts[which]
    sharing = len(range(which, readers, len(parts)))
    return [TarPart(tar, first + every * (number // len(parts)), every * sharing)]


def samples_in(tar: str, labels: Labels) -> Iterator[StoredSample]:
    """Yield the samples of a tar in order; DataError for what is no sample, or not whole."""
    shown, is_empty = one_line(tar), True
    with opened(tar) as stream:
        watched = _Watched(stream, shown)
        try:
            with tarfile.open(None, "r|", fileobj=watched, bufsize=READ_BYTES) as archive:
                of_key = groupby(_members(archive, watched, shown), lambda member: member.key)
                for key, members in of_key:
                    yield StoredSample(shown, _sample(key, members, f"{shown}: {key}", labels))
                    is_empty = False
        except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
            raise DataError(clean(f"{shown}: not a whole tar: {error}")) from None
        watched.check_end()
    if is_empty:
        raise DataError(f"{shown}: no samples in it: images, each with a .cls or a .json")


class _Member(NamedTuple):
    key: str
    suffix: str
    data: bytes


def _members(archive: tarfile.TarFile, watched: _Watched, shown: str) -> Iterator[_Member]:
    """Yield the members that are an image or may have a class."""
    while member := archive.next():
        archive.members = []  # type: ignore[attr-defined]  # or they would all be kept
        has_data = member.isreg() or member.type not in tarfile.SUPPORTED_TYPES
        size = member.size if has_data else 0
        if member.issparse():
            raise DataError(
                clean(f"{shown}: {member.name} is sparse: pack it again without --sparse")
            )
        watched.end = member.offset_data + -(-size // BLOCK) * BLOCK
        key, suffix = key_and_suffix(member.name)
        file, suffix = key.rpartition("/")[2], suffix.lower()
        if not (member.isreg() and file and suffix in MOST_BYTES) or is_meta(file):
            continue
        if size > MOST_BYTES[suffix]:
            raise DataError(clean(f"{shown}: {member.name}: {size:,} bytes are too many"))
        content = archive.extractfile(member)
        assert content
        data = content.read()
        if len(data) < size:
            raise DataError(clean(f"{shown}: cut short within {member.name}"))
        yield _Member(key, suffix, data)


def _sample(key: str, members: Iterable[_Member], where: str, labels: Labels) -> Sample:
    contents: dict[str, bytes] = {}
    for member in members:
        if member.suffix in contents:
            raise DataError(clean(f"{where}{member.suffix} is in it twice"))
        contents[member.suffix] = member.data
    images = [suffix for suffix in contents if suffix in IMAGES]
    if len(images) != 1:
        raise DataError(clean(f"{where}: {len(images)} images; each sample has one"))
    suffix = images[0]
    return Sample(key, contents[suffix], suffix[1:], labels.number(contents, where))


class _Watched(io.RawIOBase):
    """A stream of a tar that knows what follows the last member.

    Where a header is damaged, tarfile takes it for the end.
    """

    end = 0
    """Where the last member ended."""

    def __init__(self, stream: Stream, shown: str) -> None:
        self._stream, self._shown, self._count, self._last = stream, shown, 0, b""

    def read(self, size: int = READ_BYTES, /) -> bytes:
        """Return up to so many bytes; none at the end."""
        data = self._stream.read(size)
        self._count += len(data)
        self._last = (self._last + data)[-2 * READ_BYTES :]
        if self._count - self.end > MOST_HEADER_BYTES + READ_BYTES:  # tarfile would keep them all
            raise DataError(f"{self._shown}: the headers at byte {self.end} are too long")
        return data

    def check_end(self) -> None:
        """Read the rest; DataError unless it is the mark that ends a whole tar."""
        rest = self._last[len(self._last) - (self._count - self.end) :]
        marks = len(rest)
        while rest:
            if rest.strip(b"\0"):
                raise DataError(f"{self._shown}: damaged: there is no member after byte {self.end}")
            rest = self._stream.read(READ_BYTES)
            marks += len(rest)
        if marks < BLOCK:
            raise DataError(f"{self._shown}: cut short: its end marker is missing")
