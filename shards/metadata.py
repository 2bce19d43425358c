"""The manifest and the indexes of a source: one copy of an index per node.

A process that multiprocessing starts by "spawn" or "forkserver" gets the manifest with its source,
and maps the memory of the indexes. Any other pickle contains only the source, which reads them
again. A process that this one did not start maps an index by the number of its open file: the
memory has no name, and is freed when the last process has ended.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, TypeVar

from rackrun.contract.files import MANIFEST_NAME
from rackrun.errors import DataError, Unavailable
from rackrun.shard_folder import folder_and_version
from shards.index import (
    INDEX_FIELDS,
    LARGEST_MANIFEST,
    Manifest,
    Split,
    largest_index,
    parse_index,
)
from shards.versions import read_version

if TYPE_CHECKING:
    import numpy as np

    from shards.index import Shard
    from shards.source import Stored

Shared = tuple[Manifest | None, dict[str, tuple[Any, "np.dtype[Any]"]]]
"""The manifest, and by split a duplicate of the index's descriptor and the type of its rows."""

Loan = tuple[int, int, int, int]
"""An open file with an index: process, descriptor; device and inode, to know it by."""

_Content = TypeVar("_Content")


class DescribedSource(ABC):
    """The base of all sources: manifest and indexes, read once and handed to child processes."""

    def __init__(self, location: str, *arguments: Any) -> None:
        """Store the arguments that make another source like this one."""
        self.location = location
        self._arguments = arguments
        self._metadata = Metadata(location, self.read_file)

    def __reduce__(self) -> tuple[type[DescribedSource], tuple[Any, ...], Shared | None]:
        return type(self), self._arguments, self._metadata.shared()

    def __setstate__(self, shared: Shared) -> None:
        self._metadata.inherit(shared)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the data set; a Problem if there is none."""
        return self._metadata.manifest

    def index(self, split: str) -> np.ndarray:
        """Return the per-sample index of a split, verified against the manifest."""
        return self._metadata.index(split)

    def lend_index(self, split: str) -> Loan:
        """Return where other processes of this machine can map the index, while this one has it."""
        return self._metadata.lend(split)

    def borrow_index(self, split: str, loan: Loan) -> bool:
        """Use the index of another process; return False if its memory cannot be found."""
        return self._metadata.borrow(split, loan)

    def reread(self, shard: Shard, offset: int, length: int) -> Stored:
        """Return the same as `read` after bytes that were wrong."""
        return self.read(shard, offset, length)

    @abstractmethod
    def read(self, shard: Shard, offset: int, length: int) -> Stored:
        """Return exactly `length` bytes of a shard from `offset` on."""

    @abstractmethod
    def read_file(self, name: str, most_bytes: int) -> bytes:
        """Return a small file of the shard folder; DataError for a larger one."""


class Metadata:
    """The manifest and the indexes by split, read and verified on first use."""

    def __init__(self, location: str, read_file: Callable[[str, int], bytes]) -> None:
        """Read the shard folder at `location` by `read_file(name, most_bytes)`."""
        self._location = location
        self._folder, self._version = folder_and_version(location)
        self._read_file = read_file
        self._manifest: Manifest | None = None
        self._indexes: dict[str, np.ndarray] = {}
        self._memory: dict[str, int] = {}  # by split: the descriptor of what is shared

    @property
    def manifest(self) -> Manifest:
        """The manifest of the data set."""
        if self._manifest is None:
            self._manifest = _asked_twice(self._read_manifest)
        return self._manifest

    def index(self, split: str) -> np.ndarray:
        """Return the per-sample index of a split, verified against the manifest."""
        if split not in self._indexes:
            part = self.manifest.split(split)
            self._indexes[split] = _asked_twice(lambda: self._read_index(part))
        return self._indexes[split]

    def shared(self) -> Shared | None:
        """Return what a process that is being started inherits; None for any other pickle."""
        if not get_spawning_popen():
            return None
        from multiprocessing.reduction import DupFd

        return self._manifest, {
            split: (DupFd(self._descriptor(split)), self._indexes[split].dtype)
            for split in self._indexes
        }

    def inherit(self, shared: Shared) -> None:
        """Take over what the parent process has read."""
        self._manifest, indexes = shared
        for split, (duplicate, dtype) in indexes.items():
            descriptor = duplicate.detach()
            self._indexes[split] = _view(descriptor, dtype)
            os.close(descriptor)

    def lend(self, split: str) -> Loan:
        """Return where other processes find the memory of an index."""
        self.index(split)
        descriptor = self._descriptor(split)
        return os.getpid(), descriptor, *_identity(descriptor)

    def borrow(self, split: str, loan: Loan) -> bool:
        """Map the index of another process; return False if its memory cannot be found."""
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
        self._memory[split], self._indexes[split] = descriptor, _view(descriptor, dtype)
        return True

    def __del__(self) -> None:
        for descriptor in self._memory.values():
            os.close(descriptor)

    def _read_manifest(self) -> Manifest:
        text = self._read_file(MANIFEST_NAME, LARGEST_MANIFEST)
        newest = Manifest.parse(text, f"{self._folder.rstrip('/')}/{MANIFEST_NAME}")
        version = self._version or newest.number
        return read_version(newest, version, self._read_file, self._folder)

    def _read_index(self, part: Split) -> np.ndarray:
        data = self._read_file(part.index, largest_index(part.samples))
        return parse_index(data, self.manifest, part, self._location)

    def _descriptor(self, split: str) -> int:
        """Return the memory of an index; on first use, move it where others can map it."""
        if split not in self._memory:
            index, self._memory[split] = self._indexes[split], os.memfd_create(split)
            with os.fdopen(self._memory[split], "wb", closefd=False) as file:
                file.write(index.data)
            self._indexes[split] = _view(self._memory[split], index.dtype)
        return self._memory[split]


def _asked_twice(ask: Callable[[], _Content]) -> _Content:
    """Return the result of a read; after a DataError, read once more, as a bit may have flipped."""
    try:
        return ask()
    except Unavailable:
        raise
    except DataError:
        return ask()


def _identity(descriptor: int) -> tuple[int, int]:
    about = os.fstat(descriptor)
    return about.st_dev, about.st_ino


def _view(descriptor: int, dtype: np.dtype[Any]) -> np.ndarray:
    import numpy as np

    if not os.fstat(descriptor).st_size:
        return np.empty(0, dtype)
    return np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), dtype)
