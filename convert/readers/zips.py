"""Zip archives read where they lie: `zipfile` lists the members, which are read by their offset.

Nothing is extracted. A zip that is stored inside another zip is read in place. The section numbers
in the comments are those of PKWARE's APPNOTE 6.3.10.
"""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from rackrun.convert.readers.extent import Extent, unpacked
from rackrun.convert.readers.records import (
    MAX_RATIO,
    Defect,
    ImageDefect,
    Listed,
    Record,
    as_text,
    open_archive,
)
from rackrun.errors import DataError
from rackrun.terminal import clean, say
from rackrun.units import plural

LOCAL = struct.Struct("<4s4xH16xHH")  # 4.3.7; with method, name and extra length
LOCAL_MAGIC = b"PK\3\4"
UNICODE_PATH = 0x7075  # 4.6.9: an extra field with the name in UTF-8
ENCRYPTED, UTF8 = 1 << 0, 1 << 11
STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
METHODS = {1: "Shrink", 6: "Implode", 9: "Deflate64", 12: "bzip2", 14: "LZMA", 93: "Zstandard"}
MADE_ON_FAT = 0  # 4.4.2.2: by a program of Windows, some of which separate folders by \
MAX_TABLE_BYTES = 400 << 20  # of the contents: Kaggle's ImageNet has 300 MB
MAX_32_BITS = 1 << 32

UNREADABLE = (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, struct.error)
"""What zipfile raises at damaged tables of contents."""


class Zip:
    """A zip archive: a file, or an extent of one. A record's offset is that of its local header."""

    def __init__(self, path: Path, extent: Extent | None = None) -> None:
        self.path, self.name = path, as_text(path.name)
        self._file = extent or Extent(path, open_archive(path), MAX_TABLE_BYTES)
        self._has_warned = False

    def records(self) -> Iterator[Listed]:
        """Yield every file of the archive as a record that lacks key and label.

        Of members with the same name the last one counts, as when an archive is unpacked. DataError
        for an archive that is damaged or hostile.
        """
        guessed = list[str]()
        self._file.seek(0)
        try:
            with zipfile.ZipFile(self._file) as archive:
                members = archive.infolist()
                self._refuse_overlaps(members)
                for info in members:
                    name, is_guessed = _name_of(info)
                    guessed += [name] * is_guessed
                    self._refuse_hostile(name, info)
                    if archive.getinfo(info.filename) is not info:
                        yield ImageDefect(name, "replaced")
                    elif name and not name.endswith("/"):
                        yield self._record(name, info)
        except UNREADABLE as error:
            what = "empty" if not self._file.length else "cut off, damaged, or no zip archive"
            raise DataError(f"{self.path}: {what} ({error}); download it again") from None
        self._warn_of_guesses(guessed)

    def within(self, member: Record, scratch: Path) -> Zip:
        """Open the archive that is a member of this one.

        A stored one is read in place; a deflated one is unpacked, as a whole, into a file without
        a name in the folder `scratch`, which is gone when the last process has ended.
        """
        path = self.path / member.name
        try:
            start, method = self._content(member.offset)
        except Defect as defect:
            raise DataError(f"{path}: {defect.detail}; download it again") from None
        if method == STORED:
            return Zip(path, self._file.part(path, start, member.size))
        with zipfile.ZipFile(self._file) as archive:
            first = self._file.start  # of the archive's bytes
            info = next(i for i in archive.infolist() if first + i.header_offset == member.offset)
            with archive.open(info) as packed:
                descriptor = unpacked(packed, path, member.length, scratch)
        return Zip(path, Extent(path, descriptor, MAX_TABLE_BYTES))

    def read(self, record: Record, start: int = 0) -> bytes:
        """Read the content of a member; its CRC-32 is left to the caller, who needs it anyway."""
        if record.size > max(1 << 20, record.length * MAX_RATIO):
            raise Defect("too large", f"{record.length:,} bytes inflate to {record.size:,}")
        begin, method = self._content(record.offset)
        data = self._file.at(begin, record.length)
        return (data if method == STORED else inflated(data, record.size))[start:]

    def _content(self, offset: int) -> tuple[int, int]:
        """Return where the content of the member with that local header begins, and its method."""
        signature, method, name, extra = LOCAL.unpack(self._file.at(offset, LOCAL.size))
        if signature != LOCAL_MAGIC or method not in (STORED, DEFLATED):
            raise Defect("broken", "its entry in the archive is damaged")
        return offset + LOCAL.size + name + extra, method

    def _record(self, name: str, info: zipfile.ZipInfo) -> Record:
        place = self._file.start + info.header_offset, info.compress_size, info.file_size, info.CRC
        return Record("", 0, "", name, 0, *place)

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
        if info.header_offset < 0 or end > self._file.length:
            advice = "download it again, or join its parts if it has some (.z01)"
            if self._file.length > MAX_32_BITS:
                advice = (
                    "only macOS reads its Finder's archives over 4 GB: there, type "
                    "ditto -xk ARCHIVE FOLDER, and give the folder"
                )
            raise DataError(f"{self.path}: {name} lies outside the archive: damaged; {advice}")

    def _refuse_overlaps(self, members: list[zipfile.ZipInfo]) -> None:
        # Members that share their bytes let a few MB unpack to a disk full.
        for member, other in pairwise(sorted(members, key=lambda info: info.header_offset)):
            if member.header_offset + LOCAL.size + member.compress_size > other.header_offset:
                raise DataError(
                    f"{self.path}: members overlap at byte {other.header_offset:,}: damaged or "
                    "malicious"
                )

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
