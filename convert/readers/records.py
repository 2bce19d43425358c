"""An image that is to be converted: what its key, its label, where its bytes are."""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Protocol

from rackrun.errors import DataError, ReadError, UsageError
from rackrun.shards.index import Manifest
from rackrun.shards.litter import HIDDEN, system_folder

IMAGE_SUFFIXES = {
    ".jpg": "jpg",
    ".jpeg": "jpg",
    **dict.fromkeys((".jpe", ".jfif", ".pjpeg", ".pjp", ".mpo"), "jpg"),
    ".png": "png",
    ".gif": "gif",
    ".bmp": "bmp",
    ".webp": "webp",
}
READS_HEIC = find_spec("pillow_heif") is not None
"""Whether Pillow reads HEIC here: pillow-heif is installed."""
HEIC_SUFFIXES = (".heic", ".heif")
REENCODED_SUFFIXES = (  # become JPEGs
    *(".tif", ".tiff", ".avif", ".ppm", ".pgm", ".pbm", ".pnm"),
    *HEIC_SUFFIXES * READS_HEIC,
)
IMAGE_NAME = re.compile(  # the suffix may lack, or more may follow it where it was downloaded
    rf"(?:^|/)[^./]+$|(?:{'|'.join(map(re.escape, (*IMAGE_SUFFIXES, *REENCODED_SUFFIXES)))})"
    r"(?:\?[^/]*|[_:!~][^/.]*|\.[0-9]+)?$",
    re.IGNORECASE,
)
LOSSES = {  # kind of defect -> its description in the report
    "missing": "not there",
    "empty": "empty",
    "checksum": "not the bytes of the CRC-32 in the archive",
    "truncated": "cut off",
    "broken": "broken in structure",
    "undecodable": "cannot be decoded",
    "unknown format": "in a format that is not supported",
    "too large": "too large or malicious",
}
MAX_IMAGE_BYTES = 128 << 20
TRAIN, VAL, TEST = "train", "val", "test"
HELD_OUT = ""  # the split of records of which parts are held out
SPLITS = {  # as they are called in names of folders, tars and tables
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("val", "valid", "validation", "dev"), VAL),
    **dict.fromkeys(("test", "testing"), TEST),
}
MAX_RATIO = 200  # of a packed image over 1 MiB: what inflates further is a bomb


class Defect(Exception):
    """An image that cannot be used; `kind` is one of those in convert.images.info."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


class ImageDefect(NamedTuple):
    """A file worth a line in the quality report: its name, what was found, more about it."""

    name: str
    kind: str
    detail: str = ""

    @property
    def is_loss(self) -> bool:
        """Return True if an image is left out because of its bytes."""
        return self.kind in LOSSES


class Record(NamedTuple):
    """One image of the raw data set."""

    key: str  # its name in the shards: ASCII letters, digits, _ and -
    label: int
    split: str  # "train", "val", "test", or HELD_OUT where the hash of the key decides
    name: str  # its path in the container, as a person knows it
    container: int  # number of the container in the listing
    offset: int  # where in the container it begins, in bytes
    length: int  # bytes it takes there
    size: int  # bytes of the image itself
    crc: int | None = None  # CRC-32 of the image, if the container knows it


Listed = Record | ImageDefect
"""A file of a raw data set: an image, or why it is none."""


class Container(Protocol):
    """An archive or a folder: where the bytes of records come from."""

    @property
    def name(self) -> str:
        """Its name in the manifest."""

    def read(self, record: Record, start: int = 0) -> bytes:
        """Read the image of a record, which is not too large, from one of its bytes on.

        Defect if it alone is damaged, a Problem if all is lost.
        """


@dataclass
class RecordListing:
    """A raw data set as its reader lists it: the input of `pack`."""

    dataset: str
    classes: tuple[str, ...]
    containers: tuple[Container, ...]
    records: Iterator[Listed]
    needs_all: bool = False
    """True for a published set, of which no image may be missing."""
    as_published: bool = False
    """True for a published set, whose baselines ignore EXIF orientation and keep its copies."""
    usual: tuple[str, ...] = ()
    """Kinds of peculiarities not to report, since all images of the set have them."""
    no_val: str = ""
    """The error for a source without a validation split."""
    stored: Manifest | None = None
    """Of shards that are converted once more, what earlier conversions did with the images."""
    group_of: Callable[[Record], str] | None = None
    """The group of a record, whose images stay on one side when some are held out."""


def is_image(name: str) -> bool:
    """Return True if a name may be that of an image; hidden files and litter of macOS are none.

    It is by its suffix, or lacks one, so that the bytes decide.
    """
    return bool(IMAGE_NAME.search(name)) and not HIDDEN.search(name)


def images(files: Iterable[Listed]) -> Iterator[Listed]:
    """Yield the files, as defects those that are no images by name or have no content.

    Folders of the system are named once each, whatever is in them.
    """
    systems = set[str]()
    for file in files:
        if isinstance(file, ImageDefect):
            yield file
        elif system := system_folder(file.name):
            if system not in systems:
                yield ImageDefect(system, "system")
            systems.add(system)
        elif file.name.lower().endswith(HEIC_SUFFIXES) and not READS_HEIC:
            yield ImageDefect(file.name, "heic")
        elif not is_image(file.name):
            yield ImageDefect(file.name, "ignored")
        else:
            yield file if file.size else ImageDefect(file.name, "empty")


def excluded(path: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern of a shell matches a path, or the name at its end."""
    name = path.rpartition("/")[2]
    return any(fnmatchcase(each, pattern) for pattern in patterns for each in (path, name))


def as_text(name: str) -> str:
    """Return a file's name as text: bytes that are no UTF-8 become \\xNN."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def opened(path: Path) -> int:
    """Open a regular file; OSError for all else, also for a pipe, without waiting."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return descriptor


def open_archive(path: Path) -> int:
    """Open an archive that the user has named; UsageError if there is none."""
    try:
        return opened(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be opened: {error.strerror}") from None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of the operating system at reading a source into a ReadError."""
    try:
        yield
    except OSError as error:
        raise ReadError(
            f"{path}: cannot be read: {error.strerror}; what is finished is kept: when the source "
            "is back, type the same command to continue"
        ) from None


def pread_exactly(descriptor: int, length: int, offset: int, where: Path) -> bytes:
    """Read bytes of an archive; DataError if it has become shorter since it was listed."""
    with reading(where):
        data = os.pread(descriptor, length, offset)
    if len(data) < length:
        raise DataError(f"{where}: cut off at byte {offset + len(data):,}")
    return data
