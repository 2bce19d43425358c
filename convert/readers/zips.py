"""Reading zip archives where they lie: the table of contents, then members by their offset.

Nothing is extracted. A zip that is stored inside another zip is read in place. `zipfile` reads the
table; the section numbers in the comments are those of PKWARE's APPNOTE 6.3.10.
"""

import array
import hashlib
import os
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rackrun.atomic import PARTIAL, translated_os_errors
from rackrun.convert.readers.extent import Extent
from rackrun.convert.readers.records import (
    MAX_IMAGE_BYTES,
    MAX_RATIO,
    Defect,
    ImageDefect,
    Record,
    as_text,
    open_archive,
)
from rackrun.errors import DataError, SaveError
from rackrun.shards.index import Origin
from rackrun.terminal import clean, say
from rackrun.units import data_size, plural

LOCAL = struct.Struct("<4s4xH16xHH")  # 4.3.7; with method, name and extra length
LOCAL_MAGIC = b"PK\3\4"
UNICODE_PATH = 0x7075  # 4.6.9: an extra field with the name in UTF-8
ENCRYPTED, UTF8 = 1 << 0, 1 << 11
STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
METHODS = {1: "Shrink", 6: "Implode", 9: "Deflate64", 12: "bzip2", 14: "LZMA", 93: "Zstandard"}
MADE_ON_FAT = 0  # 4.4.2.2: by a program of Windows, some of which separate folders by \
MAX_TABLE_BYTES = 1 << 30  # of the contents: Kaggle's ImageNet has 0.3 GB
MAX_32_BITS = 1 << 32
CHUNK_BYTES = 1 << 20

UNREADABLE = (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, struct.error)
"""What zipfile raises at damaged tables of contents."""


class ZipMember(NamedTuple):
    """An entry of the table of contents."""

    name: str
    offset: int  # of its local header, in the file on disk
    packed: int  # bytes in the archive
    size: int  # bytes of the content
    crc: int
    method: int


class Zip:
    """A zip archive: a file, or an extent of one."""

    def __init__(self, path: Path, extent: Extent | None = None) -> None:
        self.path = path
        self._extent = extent or Extent.whole(path, open_archive(path), MAX_TABLE_BYTES)
        self._listing = hashlib.sha256()
        self._has_warned = False
        self.findings: list[ImageDefect] = []
        """Members that a later one replaces; complete once the records are exhausted."""

    def origin(self) -> Origin:
        """Return the archive's entry of the manifest; its members must have been listed."""
        return Origin(as_text(self.path.name), self._extent.length, self._listing.hexdigest())

    def members(self) -> Iterator[ZipMember]:
        """Yield every file of the archive in the order of its table; DataError if it is hostile.

        Of members with the same name the last one counts, as when an archive is unpacked.
        """
        self._listing = hashlib.sha256()
        self.findings.clear()
        # zipfile takes 0.5 KB a member: of that only names and numbers stay while they are yielded.
        names, columns = list[str](), [array.array("Q") for _ in range(5)]
        guessed = list[str]()
        for info, is_last in self._entries():
            name, is_guessed = _name_of(info)
            if is_guessed:
                guessed.append(name)
            self._refuse_hostile(name, info)
            if not is_last:
                self.findings.append(ImageDefect(name, "replaced"))
                name = ""
            names.append(name)
            offset = self._extent.base + info.header_offset
            numbers = (offset, info.compress_size, info.file_size, info.CRC, info.compress_type)
            for column, number in zip(columns, numbers, strict=True):
                column.append(number)
        self._refuse_overlaps(*columns[:2])
        self._warn_of_guesses(guessed)
        for name, *row in zip(names, *columns, strict=True):
            if name and not name.endswith("/"):
                member = ZipMember(name, *row)
                self._listing.update(f"{member}\n".encode("utf-8", "surrogateescape"))
                yield member

    def records(self) -> Iterator[Record]:
        """Yield every file of the archive as a record that lacks key and label."""
        return (self.record(member, "", 0) for member in self.members())

    def within(self, member: ZipMember, scratch: Path) -> "Zip":
        """Open the archive that is a member of this one.

        A stored one is read in place; a deflated one is unpacked, as a whole, into a file without
        a name in the folder `scratch`, which is gone when the last process has ended.
        """
        path, descriptor = self.path / member.name, self._extent.descriptor
        start, method = self._content(member.offset)
        if method != STORED:
            self._refuse_bomb(member, scratch)
            descriptor = nameless_file(scratch)
            self._unpack(member, start, descriptor, scratch)
            start = 0
        return Zip(path, Extent(path, descriptor, start, member.size, MAX_TABLE_BYTES))

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
        start, method = self._content(record.offset)
        packed = self._read(start, record.length)
        if method == STORED:
            return packed
        return inflated(packed, record.size)

    def _content(self, offset: int) -> tuple[int, int]:
        """Return where the content of the member with that local header begins, and its method."""
        signature, method, name, extra = LOCAL.unpack(self._read(offset, LOCAL.size))
        if signature != LOCAL_MAGIC or method not in (STORED, DEFLATED):
            raise Defect("broken", "its entry in the archive is damaged")
        return offset + LOCAL.size + name + extra, method

    def _entries(self) -> Iterator[tuple[zipfile.ZipInfo, bool]]:
        """Yield all entries, and whether each is the last one of its name."""
        self._extent.seek(0)
        try:
            with zipfile.ZipFile(self._extent) as archive:
                for info in archive.infolist():
                    yield info, archive.getinfo(info.filename) is info
        except UNREADABLE as error:
            what = "empty" if not self._extent.length else "cut off, damaged, or no zip archive"
            raise DataError(f"{self.path}: {what} ({error}); download it again") from None

    def _refuse_hostile(self, name: str, info: zipfile.ZipInfo) -> None:
        if info.flag_bits & ENCRYPTED:
            raise DataError(f"{self.path}: {name} is encrypted; unpack it and give the folder")
        if info.compress_type not in (STORED, DEFLATED):
            how = METHODS.get(info.compress_type, f"method {info.compress_type}")
            raise DataError(
                f"{self.path}: {name} is packed with {how}, which is not read; unpack the "
                "archive and give the folder"
            )
        if stat.S_ISLNK(info.external_attr >> 16):
            raise DataError(f"{self.path}: {name} is a symbolic link; unpack it, give the folder")
        end = info.header_offset + LOCAL.size + info.compress_size
        if info.header_offset < 0 or end > self._extent.length:
            advice = "download it again"
            if self._extent.length > MAX_32_BITS:
                advice = (
                    "archives over 4 GB of macOS' Finder are read by nothing else: there, type "
                    "ditto -xk ARCHIVE FOLDER, and give the folder"
                )
            raise DataError(f"{self.path}: {name} lies outside the archive: damaged; {advice}")

    def _refuse_overlaps(self, starts: "array.array[int]", lengths: "array.array[int]") -> None:
        # Members that share their bytes let a few MB unpack to a disk full.
        limit = self._extent.base + self._extent.length
        for number in sorted(range(len(starts)), key=starts.__getitem__, reverse=True):
            if starts[number] + LOCAL.size + lengths[number] > limit:
                raise DataError(
                    f"{self.path}: members overlap at byte {limit:,}: damaged, or made to do harm"
                )
            limit = starts[number]

    def _warn_of_guesses(self, names: list[str]) -> None:
        if names and not self._has_warned:
            self._has_warned = True
            say(
                clean(
                    f"{self.path}: {plural(len(names), 'name')} in an unknown code page, read as "
                    f"code page 437: {names[0]}; if that is wrong, unpack the archive and give "
                    "the folder"
                )
            )

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

    def _read(self, start: int, length: int) -> bytes:
        return self._extent.at(start - self._extent.base, length)


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


def _name_of(info: zipfile.ZipInfo) -> tuple[str, bool]:
    """Return a member's name, with / between folders, and whether its code page is a guess."""
    name, is_guessed = info.orig_filename, False
    if not info.flag_bits & UTF8:
        name, is_guessed = _decoded(name.encode("cp437"), info.extra)
    name = name.partition("\0")[0]
    if info.create_system == MADE_ON_FAT and "/" not in name:
        name = name.replace("\\", "/")  # as of PowerShell's Compress-Archive
    return name, is_guessed


def _decoded(raw: bytes, extra: bytes) -> tuple[str, bool]:
    # Programs that do not set the flag write UTF-8 (macOS), a field with it (Info-ZIP, WinZip), or
    # the code page of their country, which nothing in the archive names.
    if raw.isascii():
        return raw.decode(), False
    for encoded in (_unicode_path(raw, extra), raw):
        try:
            if encoded:
                return encoded.decode(), False
        except UnicodeDecodeError:
            continue
    return raw.decode("cp437"), True


def _unicode_path(raw: bytes, extra: bytes) -> bytes:
    """Return the name in an extra field if it is that of this entry, else nothing."""
    at = 0  # of a field: its kind, its length, its content (4.5.1)
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == UNICODE_PATH and length > 5:
            version, crc = struct.unpack_from("<BL", extra[: at + 4 + length].ljust(at + 9), at + 4)
            if version == 1 and crc == zlib.crc32(raw):
                return extra[at + 9 : at + 4 + length]
        at += 4 + length
    return b""
