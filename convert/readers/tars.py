"""Tar archives read where they lie: `tarfile` lists the members, also of tars in a tar.

Nothing is extracted: a record is an offset and a size in the file on disk. Links, devices and
sparse files are refused, and so is everything behind the end marker: tarfile ends there, at a block
of zeros and at a damaged header alike, and says nothing.
"""

import bz2
import gzip
import lzma
import shlex
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rackrun.convert.readers.extent import Extent, unpacked
from rackrun.convert.readers.records import (
    ImageDefect,
    Listed,
    Record,
    as_text,
    open_archive,
    reading,
)
from rackrun.errors import DataError, UsageError
from rackrun.terminal import clean, say

BLOCK = tarfile.BLOCKSIZE
MAX_EXTENSION_BYTES = 1 << 20  # of a pax header or a long name
CHUNK_BYTES = 1 << 20
GZIP, BZIP2, XZ = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0"  # first bytes of what is packed as a whole
UNPACKS: dict[bytes, Callable[[Path], Any]] = {GZIP: gzip.open, BZIP2: bz2.open, XZ: lzma.open}
PROGRAMS = {  # which unpack it to their standard output
    GZIP: "gunzip -c",
    BZIP2: "bunzip2 -c",
    XZ: "unxz -c",
    b"\x28\xb5\x2f\xfd": "unzstd -c",
}


class Tar:
    """A tar archive: the file at `path`, or what a descriptor holds of it, unpacked."""

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        self.path, self.name = path, as_text(path.name)
        descriptor = open_archive(path) if descriptor is None else descriptor
        self._file = Extent(path, descriptor, MAX_EXTENSION_BYTES)

    def records(self) -> Iterator[Listed]:
        """Yield every file, also of tars in the tar, as a record that lacks key and label.

        Of members with the same name the last one counts, as when a tar is unpacked.
        """
        for member in _latest(self.members()):
            if isinstance(member, Record) and member.name.endswith(".tar"):
                yield from _latest(self.members(member))
            else:
                yield member

    def members(self, within: Record | None = None) -> Iterator[Record]:
        """Yield the regular files of the archive, or of the tar that is its member `within`.

        DataError unless the archive is whole to its end marker, and ends there.
        """
        part = self._file
        if within:
            path = Path(clean(f"{self.path}: {within.name}"))
            part = self._file.part(path, within.offset, within.size)
        at = 0  # of the next header
        try:
            with tarfile.open(
                fileobj=part, mode="r:", encoding="utf-8", errors="surrogateescape"
            ) as tar:
                while not _is_end(part, at):
                    # Not tar.next, which keeps all members: of a million that is a gigabyte.
                    info = tarfile.TarInfo.fromtarfile(tar)
                    _refuse_hostile(info, part)
                    at = info.offset_data + -(-info.size // BLOCK) * BLOCK
                    if at > part.length:
                        raise DataError(f"{part.path}: cut off in {info.name}; download it again")
                    if info.isreg():
                        start = part.start + info.offset_data
                        yield Record("", 0, "", info.name, 0, start, info.size, info.size)
        except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
            refuse_packed(self.path, part.at(part.start, min(BLOCK, part.length)))
            raise DataError(
                clean(
                    f"{part.path}: byte {part.start + at:,}: cut off, or no tar header ({error}); "
                    "download it again"
                )
            ) from None
        _refuse_more(part, at)

    def read(self, record: Record, start: int = 0) -> bytes:
        """Return the content of a record."""
        return self._file.at(record.offset + start, record.size - start)


def _latest(members: Iterator[Record]) -> Iterator[Listed]:
    by_name = dict[str, Record]()
    for member in members:
        if by_name.pop(member.name, None):
            yield ImageDefect(member.name, "replaced")
        by_name[member.name] = member
    yield from by_name.values()


def opened_tar(path: Path, head: bytes, scratch: Path) -> Tar:
    """Open a tar by its first bytes; one that is packed as a whole is unpacked first.

    That takes room in the folder `scratch` for as long as a process reads it.
    """
    opener = next((opener for magic, opener in UNPACKS.items() if head.startswith(magic)), None)
    if opener is None:
        return Tar(path)
    say(f"{path}: unpacking it into {scratch}, as it is compressed as a whole")
    with reading(path), opener(path) as packed:
        return Tar(path, unpacked(packed, path, path.stat().st_size, scratch))


def refuse_packed(path: Path, head: bytes) -> None:
    """Raise UsageError for a file that is compressed as a whole, by its first bytes."""
    for magic, program in PROGRAMS.items():
        if head.startswith(magic):
            stem = path.name.partition(".")[0]
            raise UsageError(
                f"{path}: compressed as a whole, so it cannot be read in place; type: "
                f"{program} {shlex.quote(str(path))} > {shlex.quote(f'{stem}.unpacked.tar')}"
            )


def _refuse_hostile(info: tarfile.TarInfo, part: Extent) -> None:
    where = f"{part.path}: {clean(as_text(info.name))}"
    if info.issparse():
        raise DataError(f"{where} is sparse: pack it again without --sparse")
    if info.islnk() or info.issym():
        kind, option = ("hard", "hard-dereference") if info.islnk() else ("symbolic", "dereference")
        raise DataError(
            f"{where} is a {kind} link; pack it again with tar --{option}, or unpack it "
            "and give the folder"
        )
    if not info.isreg() and not info.isdir():
        raise DataError(f"{where} is no regular file (type {info.type!r})")
    if info.size < 0:  # in base 256 it may be: the next header would be one that was read before
        raise DataError(f"{where} is damaged; download it again")


def _is_end(part: Extent, at: int) -> bool:
    """Return whether the end marker is there; else the next header is what is read next."""
    if at + BLOCK > part.length:
        raise DataError(f"{part.path}: has no end marker: cut off, or no tar; download it again")
    part.seek(at)
    return part.at(part.start + at, BLOCK) == bytes(BLOCK)


def _refuse_more(part: Extent, end: int) -> None:
    """Raise DataError unless zeros are all that follows the end marker."""
    part.seek(end)
    while data := part.read(CHUNK_BYTES):
        if found := len(data.lstrip(b"\0")):
            raise DataError(
                f"{part.path}: goes on at byte {part.tell() - found:,}, after its end marker, "
                "where most programs stop: if tars were joined by cat, unpack it with tar "
                "--ignore-zeros and pack it again; else it is damaged: download it again"
            )
