"""A shard folder on a disk of this machine."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rackrun.errors import DataError, UsageError
from shards.index import LARGEST_MANIFEST, MANIFEST_NAME, Manifest, Shard, Split, largest_index
from shards.metadata import Metadata
from shards.source import BLOCK_BYTES, Range, Stored
from shards.verify import verified

if TYPE_CHECKING:
    import numpy as np


class FolderSource:
    """A shard folder on a disk of this machine."""

    def __init__(self, location: str) -> None:
        self.location = location
        self._folder = Path(location)
        self._known = Metadata()

    def __reduce__(self) -> tuple[type[FolderSource], tuple[str], dict[str, Metadata]]:
        return FolderSource, (self.location,), {"_known": self._known}

    @property
    def manifest(self) -> Manifest:
        """The data set manifest; UsageError if this is no finished shard folder."""
        if not self._known.manifest:
            path = self._folder / MANIFEST_NAME
            if not path.exists():
                raise UsageError(self._why_no_manifest())
            self._known.manifest = Manifest.parse(_whole_file(path, LARGEST_MANIFEST), str(path))
        return self._known.manifest

    def index(self, split: str) -> np.ndarray:
        """The per-sample index of a split, verified against the manifest."""
        return self._known.index(self.manifest, split, self.location, self._index_file)

    def stream(self, shard: Shard) -> Iterator[Stored]:
        """The bytes of a shard in blocks; DataError at the end if size or digest are wrong."""
        path = self._folder / shard.name
        with _opened(path) as file:
            blocks = _blocks(file, path, shard.bytes + 1)
            yield from verified(blocks, shard, str(path))

    def read(self, shard: Shard, offset: int, length: int) -> Stored:
        """Exactly `length` bytes of a shard from `offset` on."""
        path = self._folder / shard.name
        with _opened(path) as file, _reading(path):
            data = os.pread(file, length, offset)
        if len(data) != length:
            raise DataError(f"{path}: ends at byte {offset + len(data)}, not at {shard.bytes}")
        return data

    def reads(self, ranges: Iterable[Range]) -> Iterator[Stored]:
        """Each range in turn; the kernel reads ahead."""
        return (self.read(*wanted) for wanted in ranges)

    def _index_file(self, part: Split) -> bytes:
        return _whole_file(self._folder / part.index, largest_index(part.samples))

    def _why_no_manifest(self) -> str:
        if not self._folder.is_dir():
            return f"{self.location}: there is no such folder"
        return (
            f"{self.location}: not a finished shard folder ({MANIFEST_NAME} is missing); if a "
            "conversion was interrupted, run the same python -m convert command again"
        )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The descriptor of a file; DataError for what is none, such as a pipe that never ends."""
    with _reading(path):
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise DataError(f"{path}: not a file")
        yield file
    finally:
        os.close(file)


def _whole_file(path: Path, most_bytes: int) -> bytes:
    """The bytes of a file; DataError where there are more than that."""
    with _opened(path) as file:
        data = b"".join(_blocks(file, path, most_bytes + 1))
    if len(data) > most_bytes:
        raise DataError(f"{path}: longer than {most_bytes:,} bytes, which is too much for it")
    return data


def _blocks(descriptor: int, path: Path, most_bytes: int) -> Iterator[bytes]:
    while most_bytes > 0:
        with _reading(path):
            block = os.read(descriptor, min(BLOCK_BYTES, most_bytes))
        if not block:
            return
        most_bytes -= len(block)
        yield block


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what the operating system says about reading `path` into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
