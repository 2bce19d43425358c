"""Fetch the shards of a run's data into a cache folder of this host, while it trains.

One process of a host fetches a data set at a time. A kill leaves hidden partial files, which the
next one removes, and locks, which are the kernel's and end with their holder.
"""

import fcntl
import logging
import os
import shutil
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rackrun.atomic import atomic_write, partials, translated_os_errors
from rackrun.errors import Problem
from rackrun.shards.cache import CachedSource
from rackrun.shards.host_folder import alone
from rackrun.shards.index import Shard
from rackrun.shards.source import Source

FREE_PART = 10  # without a limit, a tenth of the disk is left free
FETCHING = "fetching"  # the folder that is locked by the process that fetches a data set
END_SECONDS = 5.0  # for the thread to notice that the run has ended

_log = logging.getLogger(__name__)


class CacheFiller:
    """Fetches whole shards in a thread, each verified by its digest before it gets its name."""

    def __init__(
        self, sources: Sequence[Source], splits: Collection[str], limit_bytes: int = 0
    ) -> None:
        """Take the sources of a run, and the splits that it reads.

        `limit_bytes`: of all data sets in the folder; 0: leave a tenth of its disk free.
        """
        self._sources = [source for source in sources if isinstance(source, CachedSource)]
        self._splits, self._limit_bytes = splits, limit_bytes
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self.fetched_bytes = 0

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Fetch in a thread until the block ends; what is in use until then is not removed."""
        with ExitStack() as uses:
            try:
                for source in self._sources:
                    with translated_os_errors(source.shard_folder):
                        uses.enter_context(_used(source.shard_folder))
            except Problem as problem:
                _warn(problem, self._sources[0])
                self._sources = []
            if self._sources:
                self._thread = threading.Thread(target=self._fill, daemon=True)
                self._thread.start()
            try:
                yield
            finally:
                self._ends.set()
                if self._thread:
                    self._thread.join(END_SECONDS)

    @property
    def is_filling(self) -> bool:
        """Whether shards are still being fetched."""
        return self._thread is not None and self._thread.is_alive()

    def missing_bytes(self) -> int:
        """Return the size of the shards that are not here yet."""
        return sum(
            shard.bytes
            for source in self._sources
            for shard in self._shards(source)
            if not source.has(shard)
        )

    def _shards(self, source: CachedSource) -> list[Shard]:
        splits = [split for split in source.manifest.splits if split.name in self._splits]
        return [shard for split in splits for shard in split.shards]

    def _fill(self) -> None:
        for source in self._sources:
            try:
                with translated_os_errors(source.shard_folder):
                    self._fill_one(source)
            except Problem as problem:
                _warn(problem, source)

    def _fill_one(self, source: CachedSource) -> None:
        folder, turn = source.shard_folder, source.shard_folder / FETCHING
        turn.mkdir(exist_ok=True)
        with alone(turn, self._ends.is_set) as is_alone:
            if not is_alone:  # the run has ended meanwhile
                return
            for path in partials(folder):
                path.unlink(missing_ok=True)
            for shard in self._shards(source):
                if source.has(shard):
                    continue
                if self._ends.is_set() or not self._fetch(source, shard):
                    return

    def _fetch(self, source: CachedSource, shard: Shard) -> bool:
        """Fetch a shard; return False if there is no room for it or the run has ended."""
        if not _make_room(source.own_folder, shard.bytes, self._limit_bytes):
            limit = (
                f"--cache-size {self._limit_bytes / 1e9:g}" if self._limit_bytes else "a tenth free"
            )
            _warn(f"{source.own_folder.parent} is full ({limit})", source)
            return False
        path = source.path(shard)
        with suppress(_Ended), atomic_write(path, 0o600) as file:
            for block in source.origin.stream(shard):
                if self._ends.is_set():
                    raise _Ended
                file.write(block)
                self.fetched_bytes += len(block)
            return True
        return False


def _warn(why: object, source: CachedSource) -> None:
    _log.warning("cache: %s; the rest is read from %s", why, source.location)


class _Ended(Exception):
    """The run has ended while a shard was being fetched."""


@contextmanager
def _used(folder: Path) -> Iterator[None]:
    """Hold a data set, so that no other run removes it, and note when it was used."""
    folder.mkdir(mode=0o700, exist_ok=True)
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
        os.utime(file)
        yield
    finally:
        os.close(file)


def _make_room(own_folder: Path, needed_bytes: int, limit_bytes: int) -> bool:
    """Remove data sets that nobody uses, the longest unused first, until so much fits."""
    while not _fits(own_folder, needed_bytes, limit_bytes):
        if not _remove_longest_unused(own_folder):
            return False
    return True


def _fits(own_folder: Path, needed_bytes: int, limit_bytes: int) -> bool:
    if limit_bytes:
        return _size(own_folder) + needed_bytes <= limit_bytes
    disk = shutil.disk_usage(own_folder)
    return disk.free - needed_bytes >= disk.total // FREE_PART


def _size(own_folder: Path) -> int:
    size = 0
    for path in own_folder.glob("*/*"):
        with suppress(OSError):  # removed meanwhile
            size += path.stat().st_size
    return size


def _remove_longest_unused(own_folder: Path) -> bool:
    """Remove one data set; return False if none is left, or all are in use."""
    last = {path: path.stat().st_mtime for path in own_folder.iterdir() if path.is_dir()}
    for folder in sorted(last, key=last.__getitem__):
        with alone(folder, lambda: True) as is_unused:
            if is_unused:
                shutil.rmtree(folder)
                return True
    return False
