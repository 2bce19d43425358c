"""What a source has read of its data set: one copy for a rank and all its loader workers.

A process that multiprocessing starts by "spawn" or "forkserver" gets the manifest with its source,
and maps the memory of the indexes. In any other pickle a source travels alone and reads them anew.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, TypeVar

from rackrun.errors import DataError, Unavailable
from shards.index import Manifest, Split, parse_index

if TYPE_CHECKING:
    import numpy as np

Answer = TypeVar("Answer")


class Metadata:
    """The manifest, and the indexes by split."""

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.indexes: dict[str, np.ndarray] = {}
        self._memory: dict[str, int] = {}  # by split: the descriptor of what is shared

    def index(
        self, manifest: Manifest, split: str, where: str, read: Callable[[Split], bytes]
    ) -> np.ndarray:
        """Return the verified index of a split; `read` gives its file when first asked."""
        if split not in self.indexes:
            part = manifest.split(split)
            self.indexes[split] = asked_twice(
                lambda: parse_index(read(part), manifest, part, where),
            )
        return self.indexes[split]

    def __reduce__(self) -> tuple[Any, ...]:
        if not get_spawning_popen():
            return Metadata, ()
        from multiprocessing.reduction import DupFd

        return _received, (
            self.manifest,
            {
                split: (DupFd(self._shared(split)), self.indexes[split].dtype)
                for split in self.indexes
            },
        )

    def __del__(self) -> None:
        for descriptor in self._memory.values():
            os.close(descriptor)

    def _shared(self, split: str) -> int:
        """The memory of an index, which moves to where others can map it when first asked for."""
        if split not in self._memory:
            index, self._memory[split] = self.indexes[split], os.memfd_create(split)
            with os.fdopen(self._memory[split], "wb", closefd=False) as file:
                file.write(index.data)
            self.indexes[split] = _view(self._memory[split], index.dtype)
        return self._memory[split]


def asked_twice(ask: Callable[[], Answer]) -> Answer:
    """What somebody says, when asked again if it is a DataError: a bit may flip on the way."""
    try:
        return ask()
    except Unavailable:
        raise
    except DataError:
        return ask()


def _received(manifest: Manifest | None, shared: dict[str, tuple[Any, np.dtype[Any]]]) -> Metadata:
    known = Metadata()
    known.manifest = manifest
    for split, (duplicate, dtype) in shared.items():
        descriptor = duplicate.detach()
        known.indexes[split] = _view(descriptor, dtype)
        os.close(descriptor)
    return known


def _view(descriptor: int, dtype: np.dtype[Any]) -> np.ndarray:
    import numpy as np

    if not os.fstat(descriptor).st_size:
        return np.empty(0, dtype)
    return np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), dtype)
