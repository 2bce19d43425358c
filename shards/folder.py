"""A shard folder on a disk of this machine."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from rackrun.contract.files import MANIFEST_NAME
from rackrun.errors import DataError, UsageError
from rackrun.shard_folder import folder_and_version, why_no_shards
from rackrun.shards.host_folder import mapped_file
from rackrun.shards.index import Shard, Split, largest_index
from rackrun.shards.source import Source, Stored


class FolderSource(Source):
    """A shard folder on a disk of this machine."""

    def __init__(self, location: str) -> None:
        super().__init__(location, location)
        self._folder = Path(folder_and_version(location)[0])

    def stream(self, shard: Shard) -> Iterator[Stored]:
        """Yield the bytes of a shard in blocks; DataError if its size or its digest is wrong."""
        path = self._folder / shard.name
        with _opened(path) as file:
            size = os.fstat(file).st_size
        if size != shard.bytes:
            raise DataError(f"{path}: {size} bytes long, not the {shard.bytes} in the manifest")
        yield from super().stream(shard)

    def read(self, shard: Shard, offset: int, length: int) -> Stored:
        """Return exactly `length` bytes of a shard from `offset` on."""
        return self.part(self._folder / shard.name, shard, offset, length)

    @staticmethod
    def part(path: Path, shard: Shard, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes of a shard in a file from `offset` on."""
        with _opened(path) as file, _reading(path):
            data = os.pread(file, length, offset)
        if len(data) != length:
            raise DataError(f"{path}: ends at byte {offset + len(data)}, not at {shard.bytes}")
        return data

    def index_data(self, part: Split, again: bool) -> bytes | mmap.mmap:
        """Return the bytes of an index, mapped from its file."""
        path, most_bytes = self._folder / part.index, largest_index(part.samples)
        with _opened(path) as file:
            if os.fstat(file).st_size > most_bytes:
                raise _too_long(path, most_bytes)
            return mapped_file(file)

    def read_file(self, name: str, most_bytes: int) -> bytes:
        """Return a small file of the folder; DataError for a larger one."""
        path = self._folder / name
        if name == MANIFEST_NAME and (reason := why_no_shards(str(self._folder))):
            raise UsageError(reason)
        with _opened(path) as file, _reading(path):
            data = os.pread(file, most_bytes + 1, 0)
        if len(data) > most_bytes:
            raise _too_long(path, most_bytes)
        return data


def _too_long(path: Path, most_bytes: int) -> DataError:
    return DataError(f"{path}: longer than {most_bytes:,} bytes, which is too long")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Give the descriptor of a regular file; DataError for anything else, such as a pipe."""
    with _reading(path):
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise DataError(f"{path}: not a file")
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
