"""Reading zip archives where they lie: the table of contents, then members by their offset.

Nothing is extracted. A zip that is stored inside another zip is read in place. The format is that
of PKWARE's APPNOTE 6.3.10; names in the comments are its section numbers.
"""

import array
import hashlib
import os
import shutil
import stat
import struct
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from convert.readers.records import (
    MAX_IMAGE_BYTES,
    MAX_RATIO,
    Defect,
    Record,
    as_text,
    open_archive,
    pread_exactly,
)
from rackrun.atomic import PARTIAL, translated_os_errors
from rackrun.errors import DataError, SaveError
from rackrun.units import data_size
from shards.index import Origin

LOCAL = struct.Struct("<4s2xHH12xLHH")  # 4.3.7; with flags, method, size, name and extra length
CENTRAL = struct.Struct("<8xHH4xLLLHHH4xLL")  # 4.3.12
END = struct.Struct("<4s4xHHLLH")  # 4.3.16
END64_LOCATOR = struct.Struct("<4s4xQ4x")  # 4.3.15
END64 = struct.Struct("<24xQQQQ")  # 4.3.14

ENCRYPTED, UTF8 = 1 << 0, 1 << 11
STORED, DEFLATED = 0, 8
METHODS = {1: "Shrink", 6: "Implode", 9: "Deflate64", 12: "bzip2", 14: "LZMA", 93: "Zstandard"}
MAX_COMMENT = (1 << 16) - 1
MAX_TABLE_BYTES = 1 << 30  # of the contents: Kaggle's ImageNet has 0.3 GB
CHUNK_BYTES = 1 << 20


class ZipMember(NamedTuple):
    """An entry of the table of contents."""

    name: str
    offset: int  # of its local header, in the file on disk
    packed: int  # bytes in the archive
    size: int  # bytes of the content
    crc: int
    method: int


@dataclass(frozen=True)
class _End:
    """The table of contents: its offset in the file, and by how much its offsets are off."""

    start: int
    length: int
    entries: int
    shift: int


class Extent(NamedTuple):
    """The part of an open file that is an archive."""

    descriptor: int
    base: int
    length: int


class Zip:
    """A zip archive: a file, or an extent of one."""

    def __init__(self, path: Path, extent: Extent | None = None) -> None:
        self.path = path
        self._descriptor, self._base, self._length = extent or _whole(path)
        self._end = self._find_end()
        self._table = b""  # from `holds` to `members`: of ImageNet it is 0.3 GB
        self._table_sha256 = ""

    def origin(self) -> Origin:
        """Return the archive's entry of the manifest; its members must have been listed."""
        return Origin(as_text(self.path.name), self._length, self._table_sha256)

    def holds(self, name: str) -> bool:
        """Return False when no member has this name, in any folder; True when one may have it."""
        self._table = self._read_table()
        return name.encode() in self._table

    def members(self) -> Iterator[ZipMember]:
        """Yield every file of the archive in the order of its table; DataError if it is hostile."""
        # Arrays, of 8 bytes a number: a member more is nothing beside 1.3 million of them.
        starts, ends = array.array("Q"), array.array("Q")
        for member, end in self._entries():
            starts.append(member.offset)
            ends.append(end)
            if not member.name.endswith("/"):
                yield member
        self._refuse_overlaps(starts, ends)

    def records(self) -> Iterator[Record]:
        """Yield every file of the archive as a record that lacks key and label."""
        return (self.record(member, "", 0) for member in self.members())

    def within(self, member: ZipMember, scratch: Path) -> "Zip":
        """Open the archive that is a member of this one.

        A stored one is read in place; a deflated one is unpacked, as a whole, into a file without
        a name in the folder `scratch`, which is gone when the last process has ended.
        """
        start, method = self.content(member.offset, member.name)
        if method == STORED:
            return Zip(self.path / member.name, Extent(self._descriptor, start, member.size))
        self._refuse_bomb(member, scratch)
        descriptor = nameless_file(scratch)
        self._unpack(member, start, descriptor, scratch)
        return Zip(self.path / member.name, Extent(descriptor, 0, member.size))

    def record(self, member: ZipMember, key: str, label: int, container: int = 0) -> Record:
        """Return the record of a member that is an image."""
        extent = (member.offset, member.packed, member.size, member.crc)
        return Record(key, label, "", member.name, container, *extent)

    def read(self, record: Record) -> bytes:
        """Read the content of a member; its CRC-32 is left to the caller, who needs it anyway."""
        if max(record.size, record.length) > MAX_IMAGE_BYTES:
            raise Defect("too large", f"{max(record.size, record.length):,} bytes")
        if record.size > max(1 << 20, record.length * MAX_RATIO):
            raise Defect("too large", f"{record.length:,} bytes inflate to {record.size:,}")
        start, method = self.content(record.offset, record.name)
        packed = self._read(start, record.length)
        if method == STORED:
            return packed
        return inflated(packed, record.size)

    def content(self, offset: int, name: str) -> tuple[int, int]:
        """Return where the content of the member with that local header begins, and its method."""
        header = self._read(offset, LOCAL.size)
        signature, flags, method, _, name_length, extra_length = LOCAL.unpack(header)
        raw = self._read(offset + LOCAL.size, name_length)
        if signature != b"PK\3\4" or _decoded(raw, flags) != name:
            raise Defect("broken", "its two entries in the archive differ")
        return offset + LOCAL.size + name_length + extra_length, method

    def _refuse_bomb(self, member: ZipMember, folder: Path) -> None:
        where = f"{self.path}: {member.name}"
        if member.size > max(1 << 20, member.packed * MAX_RATIO):
            raise DataError(
                f"{where}: {member.packed:,} bytes inflate to {member.size:,}: damaged, or made to "
                "do harm"
            )
        with translated_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
        if member.size > free:
            raise SaveError(
                f"{folder}: {member.name} unpacks to {data_size(member.size)}, and "
                f"{data_size(free)} are free there; make room, or unpack it elsewhere"
            )

    def _unpack(self, member: ZipMember, start: int, descriptor: int, folder: Path) -> None:
        inflate, crc, size = zlib.decompressobj(-zlib.MAX_WBITS), 0, 0
        for at in range(0, member.packed, CHUNK_BYTES):
            packed = self._read(start + at, min(CHUNK_BYTES, member.packed - at))
            while packed and size <= member.size:
                try:
                    data = inflate.decompress(packed, CHUNK_BYTES)
                except zlib.error:
                    raise DataError(f"{self.path}: {member.name} is damaged") from None
                packed = inflate.unconsumed_tail
                crc, size = zlib.crc32(data, crc), size + len(data)
                rest = memoryview(data)
                with translated_os_errors(folder):
                    while rest:  # a write may take only a part, as on a disk that becomes full
                        rest = rest[os.write(descriptor, rest) :]
        if size != member.size or crc != member.crc:
            raise DataError(f"{self.path}: {member.name} is damaged: its CRC-32 is wrong")

    def _entries(self) -> Iterator[tuple[ZipMember, int]]:
        """Yield each member, and the byte of the file before which it cannot end."""
        table, self._table, at = self._table or self._read_table(), b"", 0
        self._table_sha256 = hashlib.sha256(table).hexdigest()
        for number in range(self._end.entries):
            if table[at : at + 4] != b"PK\1\2" or at + CENTRAL.size > len(table):
                raise DataError(f"{self.path}: entry {number} of its table of contents is damaged")
            flags, method, crc, packed, size, names, extras, comments, mode, start = (
                CENTRAL.unpack_from(table, at)
            )
            at += CENTRAL.size
            name = _decoded(table[at : at + names], flags)
            extra = table[at + names : at + names + extras]
            # Those of the three that do not fit into 32 bits are in the extra field, in this order.
            wide = iter(_zip64_values(extra))
            size, packed, start = (
                next(wide, value) if value == 0xFFFFFFFF else value
                for value in (size, packed, start)
            )
            at += names + extras + comments
            self._refuse_hostile(name, flags, method, mode >> 16)
            offset = start + self._end.shift
            end = offset + LOCAL.size + names + packed
            if offset < self._base or end > self._end.start:
                raise DataError(f"{self.path}: {name} lies outside the archive")
            yield ZipMember(name, offset, packed, size, crc, method), end

    def _read_table(self) -> bytes:
        return self._read(self._end.start, self._end.length)

    def _refuse_hostile(self, name: str, flags: int, method: int, mode: int) -> None:
        if flags & ENCRYPTED:
            raise DataError(f"{self.path}: {name} is encrypted; unpack it and give the folder")
        if method not in (STORED, DEFLATED):
            how = METHODS.get(method, f"method {method}")
            raise DataError(
                f"{self.path}: {name} is packed with {how}, which is not read; unpack the "
                "archive and give the folder"
            )
        if stat.S_ISLNK(mode):
            raise DataError(f"{self.path}: {name} is a symbolic link")

    def _refuse_overlaps(self, starts: "array.array[int]", ends: "array.array[int]") -> None:
        # Members that share their bytes let a few MB unpack to a disk full.
        limit = self._end.start
        for number in sorted(range(len(starts)), key=starts.__getitem__, reverse=True):
            if ends[number] > limit:
                raise DataError(
                    f"{self.path}: members overlap at byte {limit:,}: damaged, or made to do harm"
                )
            limit = starts[number]

    def _find_end(self) -> _End:
        tail_length = min(self._length, END.size + MAX_COMMENT)
        tail_start = self._base + self._length - tail_length
        tail = self._read(tail_start, tail_length)
        at = len(tail)
        # The comment may contain the signature, too: the record whose comment ends the file counts.
        while (at := tail.rfind(b"PK\5\6", 0, at)) >= 0:
            if at + END.size <= len(tail):
                _, _, entries, length, start, comment = END.unpack_from(tail, at)
                if at + END.size + comment == len(tail):
                    end = tail_start + at
                    return self._find_end64(end) or self._checked_end(end, entries, length, start)
        what = "is empty" if not self._length else "is cut off, or not a zip archive"
        raise DataError(f"{self.path}: {what} (no table of contents); download it again")

    def _find_end64(self, end: int) -> _End | None:
        at = end - END64_LOCATOR.size
        if at < self._base:
            return None
        signature, start64 = END64_LOCATOR.unpack(self._read(at, END64_LOCATOR.size))
        if signature != b"PK\6\7":
            return None
        if self._base + start64 + END64.size > at:
            raise DataError(f"{self.path}: its zip64 table of contents is damaged")
        _, entries, length, start = END64.unpack(self._read(self._base + start64, END64.size))
        return self._checked_end(self._base + start64, entries, length, start)

    def _checked_end(self, end: int, entries: int, length: int, start: int) -> _End:
        # The table lies right before its end record, whatever offset that names: the difference is
        # what a self-extracting program in front of the archive has moved all offsets by.
        if length > end - self._base or not entries * CENTRAL.size <= length <= MAX_TABLE_BYTES:
            raise DataError(f"{self.path}: its table of contents is damaged; download it again")
        return _End(end - length, length, entries, end - length - start)

    def _read(self, start: int, length: int) -> bytes:
        return pread_exactly(self._descriptor, length, start, self.path)


def _whole(path: Path) -> Extent:
    descriptor = open_archive(path)
    return Extent(descriptor, 0, os.fstat(descriptor).st_size)


def nameless_file(folder: Path) -> int:
    """Open a file in a folder that is gone when its last descriptor is closed."""
    with translated_os_errors(folder):
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".", suffix=PARTIAL)
        Path(name).unlink()
    return descriptor


def inflated(packed: bytes, size: int) -> bytes:
    """Inflate bytes that must come to `size`, and never more than that."""
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        data = inflate.decompress(packed, size + 1)
    except zlib.error:
        raise Defect("broken", "its packed bytes are damaged") from None
    if len(data) != size or not inflate.eof:
        raise Defect("broken", f"does not inflate to its {size:,} bytes")
    return data


def _decoded(name: bytes, flags: int) -> str:
    return name.decode("utf-8", "surrogateescape") if flags & UTF8 else name.decode("cp437")


def _zip64_values(extra: bytes) -> tuple[int, ...]:
    at = 0  # of a field: its kind, its length, its content (4.5.1); zip64 has kind 1 (4.5.3)
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            count = min(length, len(extra) - at - 4) // 8
            return struct.unpack_from(f"<{count}Q", extra, at + 4)
        at += 4 + length
    return ()
