"""Where a shard folder is read from: a folder, a server, or a cache over either.

    open_source(location) -> Source -> stream(shard): blocks of a whole tar
                                    -> read(shard, offset, length): one range of it
    samples(source, split, number) -> Sample, Sample, ...
    portions(source, requests) -> the samples of some rows of the index

Every image is verified by its row in the index (key, label, CRC-32), every whole shard by the
digest in the manifest. Nothing is skipped silently: a mismatch is a DataError that names the place,
or a sample with a fault, for callers that count and continue.

A node has one copy of an index. A process that multiprocessing starts by "spawn" or "forkserver"
gets the manifest with its source, and maps the memory of the indexes. Any other pickle has neither,
and its source reads them again. A process that this one did not start maps an index by the number
of its open file: the memory has no name, and is freed when the last process has ended.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, TypeVar

from rackrun.contract.files import LARGEST_MANIFEST, MANIFEST_NAME
from rackrun.errors import DataError, Unavailable
from rackrun.shard_folder import folder_and_version
from rackrun.shards.index import (
    INDEX_FIELDS,
    Manifest,
    Shard,
    Split,
    largest_index,
    parse_index,
    read_version,
)

if TYPE_CHECKING:
    import numpy as np

Stored = bytes | bytearray | memoryview  # bytes of a tar
Range = tuple[Shard, int, int]  # offset and length

Shared = tuple[Manifest | None, dict[str, tuple[Any, "np.dtype[Any]"]]]
"""The manifest, and by split a duplicate of the index's descriptor and the type of its rows."""

Loan = tuple[int, int, int, int]
"""An open file with an index: process, descriptor; device and inode, to know it by."""

_Content = TypeVar("_Content")


class Source(ABC):
    """A shard folder, wherever it is; cheap to pickle; any thread may use it.

    Manifest and indexes are read and verified on first use.
    """

    def __init__(self, location: str, *arguments: Any) -> None:
        """Keep the arguments that make another source like this one."""
        self.location = location
        self._arguments = arguments
        self._manifest: Manifest | None = None
        self._indexes: dict[str, np.ndarray] = {}  # by split
        self._memory: dict[str, int] = {}  # by split: the descriptor of what is shared

    def __reduce__(self) -> tuple[type[Source], tuple[Any, ...], Shared | None]:
        # Only a process that is being started can inherit memory; any other pickle goes without.
        if not get_spawning_popen():
            return type(self), self._arguments, None
        from multiprocessing.reduction import DupFd

        indexes = {
            split: (DupFd(self._descriptor(split)), self._indexes[split].dtype)
            for split in self._indexes
        }
        return type(self), self._arguments, (self._manifest, indexes)

    def __setstate__(self, shared: Shared) -> None:
        self._manifest, indexes = shared
        for split, (duplicate, dtype) in indexes.items():
            descriptor = duplicate.detach()
            self._indexes[split] = _view(descriptor, dtype)
            os.close(descriptor)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the data set; a Problem if there is none."""
        if self._manifest is None:
            self._manifest = _asked_twice(self._read_manifest)
        return self._manifest

    def index(self, split: str) -> np.ndarray:
        """Return the per-sample index of a split, verified against the manifest."""
        if split not in self._indexes:
            part = self.manifest.split(split)
            self._indexes[split] = _asked_twice(lambda: self._read_index(part))
        return self._indexes[split]

    def lend_index(self, split: str) -> Loan:
        """Return where other processes of this machine can map the index, while this one has it."""
        self.index(split)
        descriptor = self._descriptor(split)
        return os.getpid(), descriptor, *_identity(descriptor)

    def borrow_index(self, split: str, loan: Loan) -> bool:
        """Use the index of another process; return False if its memory cannot be found."""
        import numpy as np

        process, number, *identity = loan
        if split in self._indexes:
            return True
        try:
            path = f"/proc/{process}/fd/{number}"  # O_NONBLOCK: it may be another one's pipe
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # it has ended, or runs in another container
            return False
        bytes_held, rows = os.fstat(descriptor).st_size, self.manifest.split(split).samples
        dtype = np.dtype(INDEX_FIELDS)
        if bytes_held != rows * dtype.itemsize or _identity(descriptor) != tuple(identity):
            os.close(descriptor)
            return False
        self._keep(split, descriptor)
        self._indexes[split] = _view(descriptor, dtype)
        return True

    @abstractmethod
    def stream(self, shard: Shard) -> Iterator[Stored]:
        """Yield the bytes of a shard in blocks; DataError at the end if size or digest is wrong."""

    @abstractmethod
    def read(self, shard: Shard, offset: int, length: int) -> Stored:
        """Return exactly `length` bytes of a shard from `offset` on."""

    def reread(self, shard: Shard, offset: int, length: int) -> Stored:
        """Return the same after bytes that were wrong, from where they are surely right."""
        return self.read(shard, offset, length)

    @abstractmethod
    def reads(self, ranges: Iterable[Range]) -> Iterator[Stored]:
        """Yield each range in turn, while the next ones are being fetched."""

    @abstractmethod
    def read_file(self, name: str, most_bytes: int) -> bytes:
        """Return the manifest or an index as stored; DataError for a larger file."""

    def _read_manifest(self) -> Manifest:
        folder, version = folder_and_version(self.location)
        text = self.read_file(MANIFEST_NAME, LARGEST_MANIFEST)
        newest = Manifest.parse(text, f"{folder.rstrip('/')}/{MANIFEST_NAME}")
        return read_version(newest, version or newest.number, self.read_file, folder)

    def _read_index(self, part: Split) -> np.ndarray:
        data = self.read_file(part.index, largest_index(part.samples))
        return parse_index(data, self.manifest, part, self.location)

    def _descriptor(self, split: str) -> int:
        """Return the memory of an index; on first use, move it where others can map it."""
        if split not in self._memory:
            index = self._indexes[split]
            descriptor = self._keep(split, os.memfd_create(split))
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                file.write(index.data)
            self._indexes[split] = _view(descriptor, index.dtype)
        return self._memory[split]

    def _keep(self, split: str, descriptor: int) -> int:
        """Keep the memory of an index open as long as this source lives."""
        self._memory[split] = descriptor
        weakref.finalize(self, os.close, descriptor)
        return descriptor


def verified(blocks: Iterator[Stored], shard: Shard, where: str) -> Iterator[Stored]:
    """Yield the blocks of a shard; DataError at the end if length or digest are wrong."""
    digest, size = hashlib.sha256(), 0
    for block in blocks:
        digest.update(block)
        size += len(block)
        yield block
    if size > shard.bytes:
        raise DataError(f"{where}: longer than the {shard.bytes} bytes in the manifest")
    if size != shard.bytes:
        raise DataError(f"{where}: {size} bytes long, not the {shard.bytes} in the manifest")
    if digest.hexdigest() != shard.sha256:
        raise DataError(f"{where}: damaged: its SHA-256 is not the one in the manifest")


def _asked_twice(ask: Callable[[], _Content]) -> _Content:
    try:
        return ask()
    except Unavailable:
        raise
    except DataError:
        return ask()  # a bit may have flipped on the way


def _identity(descriptor: int) -> tuple[int, int]:
    about = os.fstat(descriptor)
    return about.st_dev, about.st_ino


def _view(descriptor: int, dtype: np.dtype[Any]) -> np.ndarray:
    import numpy as np

    if not os.fstat(descriptor).st_size:
        return np.empty(0, dtype)
    return np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), dtype)
