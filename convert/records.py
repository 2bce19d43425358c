"""A picture that is to be converted: what it is called, what it shows, where its bytes are."""

import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol

from shards.errors import DataError, UsageError
from shards.index import Origin
from shards.writer import MAX_KEY_BYTES

PICTURE_SUFFIXES = {
    ".jpg": "jpg",
    ".jpeg": "jpg",
    ".jpe": "jpg",
    ".png": "png",
    ".gif": "gif",
    ".bmp": "bmp",
    ".webp": "webp",
}
MAX_PICTURE_BYTES = 128 << 20
MAX_RATIO = 200  # of a packed picture over 1 MiB: what inflates further is a bomb

UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


class Defect(Exception):
    """A picture that cannot be used; `kind` is one of those in convert.quality."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


class Finding(NamedTuple):
    """A file worth a line in the quality report: its name, what was found, more about it."""

    name: str
    kind: str
    detail: str = ""


class Record(NamedTuple):
    """One picture of the raw data set; as a line of JSON it is a line of the plan."""

    key: str  # its name in the shards: ASCII letters, digits, _ and -
    label: int
    split: str  # "train", "val", or "" where the hash of the key decides
    name: str  # its path in the container, as a person knows it
    container: int  # number of the container in the listing
    offset: int  # where in the container it begins, in bytes
    length: int  # bytes it takes there
    size: int  # bytes of the picture itself
    crc: int | None = None  # CRC-32 of the picture, if the container knows it

    def line(self) -> str:
        """The record as one line of ASCII."""
        return json.dumps(self)

    @classmethod
    def parse(cls, line: str | bytes) -> "Record":
        """The record in such a line."""
        return cls(*json.loads(line))


class Container(Protocol):
    """An archive or a folder: where the bytes of records come from."""

    def origin(self) -> Origin:
        """What the card says about it."""

    def read(self, record: Record) -> bytes:
        """The picture of a record; Defect if it alone is damaged, DataError if all is lost."""


@dataclass
class Listing:
    """A raw data set as its reader sees it: everything that `pack` needs to know."""

    dataset: str
    classes: tuple[str, ...]
    containers: tuple[Container, ...]
    records: Iterator[Record]
    findings: list[Finding] = field(default_factory=list)
    """Files that are no records; complete once `records` are exhausted."""


def safe_key(text: str) -> str:
    """A key made of a name: other characters than letters, digits, _ and - become _.

    What is replaced or cut is made up for by eight characters of a hash, so that two names never
    become one key.
    """
    key = UNSAFE.sub("_", text)
    if key == text and len(key) <= MAX_KEY_BYTES:
        return key
    mark = blake2b(text.encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()
    return f"{key[: MAX_KEY_BYTES - 9]}-{mark}"


def is_picture(name: str) -> bool:
    """Whether a file is a picture by its name; litter of macOS and what is hidden are not."""
    path = PurePosixPath(name)
    names = [part for part in path.parts if part != ".."]
    hidden = "__MACOSX" in names or any(name.startswith(".") for name in names)
    return path.suffix.lower() in PICTURE_SUFFIXES and not hidden


def pictures(records: Iterator[Record], found: list[Finding]) -> Iterator[Record]:
    """Those that are pictures by their name and have content; the others are noted in `found`."""
    for record in records:
        if not is_picture(record.name):
            found.append(Finding(record.name, "ignored"))
        elif not record.size:
            found.append(Finding(record.name, "empty"))
        else:
            yield record


class Folder:
    """A folder of picture files; a record's name is the path below it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._bytes = 0
        self._listing = sha256()

    def files(self) -> Iterator[tuple[str, int]]:
        """Name and size of every regular file below, sorted; a link or a device is refused."""
        pending = [""]
        while pending:
            name = pending.pop()
            if name.endswith("/") or not name:
                pending += reversed(self._entries(name))
                continue
            size = (self.root / name).lstat().st_size
            self._bytes += size
            self._listing.update(f"{name}\0{size}\n".encode("utf-8", "surrogateescape"))
            yield name, size

    def records(self) -> Iterator[Record]:
        """Every file of the folder as a record that lacks key and label."""
        return (Record("", 0, "", name, 0, 0, size, size) for name, size in self.files())

    def origin(self) -> Origin:
        """What the card says about it; the listing must be complete."""
        return Origin(self.root.resolve().name, self._bytes, self._listing.hexdigest())

    def read(self, record: Record) -> bytes:
        """The picture of a record."""
        try:
            descriptor = os.open(self.root / record.name, os.O_RDONLY | os.O_NOFOLLOW)
            with os.fdopen(descriptor, "rb", buffering=0) as file:
                data = file.read(record.size + 1)
        except OSError as error:
            raise Defect("unreadable", error.strerror or "") from None
        if len(data) != record.size:
            raise Defect("unreadable", "its size has changed since it was listed")
        return data

    def _entries(self, name: str) -> list[str]:
        try:
            with os.scandir(self.root / name) as entries:
                return sorted(self._checked(name, entry) for entry in entries)
        except OSError as error:
            raise UsageError(f"{self.root / name}: cannot be read: {error.strerror}") from None

    def _checked(self, folder: str, entry: "os.DirEntry[str]") -> str:
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            return f"{folder}{entry.name}/"
        if not stat.S_ISREG(mode):
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"
            raise DataError(
                f"{entry.path}: {kind}, which is not followed; copy the real files: "
                f"cp -rL {self.root} COPY"
            )
        return f"{folder}{entry.name}"


def pread_exactly(descriptor: int, length: int, offset: int, where: Path) -> bytes:
    """Bytes of an archive that were there when it was listed; DataError if they are not now."""
    try:
        data = os.pread(descriptor, length, offset)
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error.strerror}") from None
    if len(data) < length:
        raise DataError(f"{where}: cut off at byte {offset + len(data):,}")
    return data
