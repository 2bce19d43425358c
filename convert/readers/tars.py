"""Reading tar archives where they lie: header by header, also of a tar inside a tar.

Nothing is extracted: a member is an offset and a size in the file on disk. The format is POSIX
ustar; of the extensions those are understood that ordinary tools write unasked, pax headers and
GNU's long names. Links, devices and sparse files are refused.
"""

import hashlib
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from convert.readers.records import (
    MAX_IMAGE_BYTES,
    Defect,
    Record,
    as_text,
    open_archive,
    pread_exactly,
)
from rackrun.errors import DataError
from shards.index import Origin

BLOCK = tarfile.BLOCKSIZE
MAX_EXTENSION_BYTES = 1 << 20  # of a pax header or a long name
DIGITS = 7  # of the length of a record in a pax header
REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE)
ANEW = "pack it again with GNU tar, without --sparse"
SIZES = (b" size=", b" GNU.sparse")  # a pax header must not have these: they would move the content


class TarMember(NamedTuple):
    """A regular file in a tar."""

    name: str
    offset: int  # of its content, in the file on disk
    size: int  # in bytes


class Tar:
    """A tar archive: the file at `path`, or what a descriptor holds of it, unpacked."""

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        self.path = path
        self._descriptor = open_archive(path) if descriptor is None else descriptor
        self._length = os.fstat(self._descriptor).st_size
        self._listing = hashlib.sha256()

    def origin(self) -> Origin:
        """Return the tar's entry of the manifest; complete once its members have been listed."""
        return Origin(as_text(self.path.name), self._length, self._listing.hexdigest())

    def members(self, within: TarMember | None = None) -> Iterator[TarMember]:
        """Yield the regular files of the archive, or of the tar that is its member `within`.

        DataError unless the archive is whole to its end marker.
        """
        at = within.offset if within else 0
        end = at + within.size if within else self._length
        where = f"{self.path}: {within.name}" if within else str(self.path)
        long_name = ""
        while True:
            header = self._header(at, end, where)
            if header is None:
                return
            content, kind = at + BLOCK, header.type
            at = content + -(-header.size // BLOCK) * BLOCK
            # A size in base 256 may be negative, and lead back to a header that was read before.
            if header.size < 0 or at > end:
                raise DataError(f"{where}: cut off in {header.name}; download it again")
            if kind in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME):
                long_name = self._long_name(kind, content, header.size, where) or long_name
                continue
            if kind == tarfile.GNUTYPE_SPARSE:
                raise DataError(f"{where}: {header.name} is sparse: {ANEW}")
            if kind not in (*REGULAR, tarfile.DIRTYPE):
                raise DataError(f"{where}: {header.name} is no regular file (type {kind!r})")
            if kind != tarfile.DIRTYPE:
                member = TarMember(long_name or header.name, content, header.size)
                self._listing.update(f"{member}\n".encode("utf-8", "surrogateescape"))
                yield member
            long_name = ""

    def records(self) -> Iterator[Record]:
        """Yield every file, also of tars in the tar, as a record that lacks key and label."""
        for member in self.members():
            for file in self.members(member) if member.name.endswith(".tar") else (member,):
                yield Record("", 0, "", file.name, 0, file.offset, file.size, file.size)

    def content(self, member: TarMember) -> bytes:
        """Return the bytes of a member."""
        return pread_exactly(self._descriptor, member.size, member.offset, self.path)

    def read(self, record: Record) -> bytes:
        """Return the image of a record."""
        if record.size > MAX_IMAGE_BYTES:
            raise Defect("too large", f"{record.size:,} bytes")
        return pread_exactly(self._descriptor, record.size, record.offset, self.path)

    def _header(self, at: int, end: int, where: str) -> tarfile.TarInfo | None:
        if at + BLOCK > end:
            raise DataError(f"{where}: has no end marker: cut off, or no tar; download it again")
        block = pread_exactly(self._descriptor, BLOCK, at, self.path)
        if block == bytes(BLOCK):
            return None
        try:
            return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise DataError(f"{where}: byte {at:,}: not a tar header: {error}") from None

    def _long_name(self, kind: bytes, content: int, size: int, where: str) -> str:
        if size > MAX_EXTENSION_BYTES:
            raise DataError(f"{where}: an extended header of {size:,} bytes")
        data = pread_exactly(self._descriptor, size, content, self.path)
        if kind == tarfile.GNUTYPE_LONGNAME:
            return data.rstrip(b"\0").decode("utf-8", "surrogateescape")
        if any(key in data for key in SIZES):
            raise DataError(f"{where}: sparse, or has files over 8 GB: {ANEW}")
        return _pax_path(data)


def _pax_path(data: bytes) -> str:
    # A record is "<length> <key>=<value>\n"; its length counts all of these bytes.
    at = 0
    while at < len(data):
        length = data[at : data.find(b" ", at)]
        if not length.isdigit() or len(length) > DIGITS or not int(length):
            return ""
        key, _, value = data[at + len(length) + 1 : at + int(length) - 1].partition(b"=")
        if key == b"path":
            return value.decode("utf-8", "surrogateescape")
        at += int(length)
    return ""
