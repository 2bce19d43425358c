"""Write a shard: a plain USTAR, complete or absent, with the same bytes for the same samples."""

import contextlib
import hashlib
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rackrun.atomic import atomic_write, translated_os_errors
from rackrun.shards.index import Shard

BLOCK = tarfile.BLOCKSIZE
EXTENSION = "jpg"  # of every image: stock readers ask for one, and their decoders go by the bytes
END = bytes(2 * BLOCK)
MTIME = 1_000_000_000  # a whole number: a fraction would cost a 1,024-byte header per member
SENT_BYTES = 4 << 20  # write-back to the disk begins in pieces of this size
MAX_KEY_BYTES = 90  # the name field has 100
KEY = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_KEY_BYTES}}}")


class SamplePosition(NamedTuple):
    """The position of a sample in its tar, in bytes: the index fields of the same names."""

    offset: int
    length: int
    image_offset: int


class ShardWriter:
    """Appends samples to one tar; made by `write_shard`."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.samples = 0
        self.bytes = 0
        self._file = file
        self._digest = hashlib.sha256()
        self._sent = 0

    def add(self, key: str, label: int, image: bytes) -> SamplePosition:
        """Append `<key>.cls` and `<key>.jpg`; return their position."""
        if not KEY.fullmatch(key):
            raise ValueError(
                f"{key!r} is not a key: letters, digits, _ and -, {MAX_KEY_BYTES} at most"
            )
        offset = self.bytes
        digits = b"%d" % label
        head = b"".join(
            (
                _header(f"{key}.cls", len(digits)),
                digits.ljust(BLOCK, b"\0"),
                _header(f"{key}.{EXTENSION}", len(image)),
            )
        )
        self._write(head, image, bytes(-len(image) % BLOCK))
        self.samples += 1
        return SamplePosition(offset, self.bytes - offset, offset + len(head))

    def close(self) -> Shard:
        """Write the end of the archive; return the shard as the manifest lists it."""
        self._write(END)
        return Shard(self.path.name, self.samples, self.bytes, self._digest.hexdigest())

    def _write(self, *pieces: bytes) -> None:
        # One by one, because joining them would copy every image.
        with translated_os_errors(self.path):
            for piece in pieces:
                self._digest.update(piece)
                self._file.write(piece)
                self.bytes += len(piece)
            if self.bytes - self._sent >= SENT_BYTES:
                self._send()

    def _send(self) -> None:
        # The disk then writes while the next samples are read, not all at once at the end.
        self._file.flush()
        length = self.bytes - self._sent
        os.posix_fadvise(self._file.fileno(), self._sent, length, os.POSIX_FADV_DONTNEED)
        self._sent = self.bytes


@contextlib.contextmanager
def write_shard(path: Path) -> Iterator[ShardWriter]:
    """Yield a writer for the tar at `path`, which appears if the block ends without an error.

    The block must call `close()`, which returns the description of the tar. Raises SaveError for a
    full disk and the like.
    """
    with atomic_write(path) as file:
        yield ShardWriter(path, file)


def _header(name: str, size: int) -> bytes:
    """Return the header of a regular file: read-only, owned by uid 0, a constant date."""
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, 0o444, MTIME
    return member.tobuf(tarfile.USTAR_FORMAT)
