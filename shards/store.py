"""A folder of blocks under their keys, shared by every process of this user on the machine.

A block's file: its length, the CRC-32 of each 128 KiB of it, its bytes. A part of a block is read
and checked without the rest.

Nothing has to be finished for the next process to go on: a block gets its name when it is whole,
the locks are the kernel's and end with their holder, and a block that a power cut or a dying disk
has spoilt fails its checksums and is fetched again. Where the folder cannot be written to, that is
said once, and everything is fetched.
"""

import contextlib
import fcntl
import logging
import os
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from shards.errors import UsageError
from shards.source import Stored

PIECE_BYTES = 128 << 10
NUMBER = struct.Struct("<Q")  # the length of a block; and the bytes of all blocks in `usage`
SPARE = 0.05  # of the limit is made free at once: finding the oldest blocks takes a while
PARTIAL = ".partial"
STUCK_SECONDS = 150.0  # more than a fetch may take; who holds a lock longer has been stopped
POLL_SECONDS = 0.01

log = logging.getLogger(__name__)


class Store:
    """Blocks of bytes by key: `obtain` fetches what is not here, once for all who want it."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.found = 0  # blocks that were here
        self.fetched = 0  # blocks that were not
        self._folder = folder / f"rackrun-cache-{os.getuid()}"
        self._complained = False
        self._make_folder()

    def obtain(
        self,
        key: str,
        part: slice,
        fetch: Callable[[], Stored],
        is_right: Callable[[Stored], bool],
    ) -> Stored:
        """A part of the block of that key; the block is fetched if need be, and kept if right."""
        data = self._load(key, part)
        if data is None:
            with self._claim(key) as partial:
                data = self._load(key, part)  # somebody may have fetched it while we waited
                if data is None:
                    return self._fetched(key, partial, fetch, is_right)[part]
        self.found += 1
        return data

    def forget(self, prefix: str) -> None:
        """Remove every block whose key begins so."""
        for path in self._path(prefix).parent.glob(f"{prefix}*"):
            path.unlink(missing_ok=True)

    def _make_folder(self) -> None:
        """Make a folder that only this user may write to; UsageError where that cannot be."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self._folder.lstat()
        except OSError as error:
            raise UsageError(f"{self._folder}: no place for a cache: {error.strerror}") from None
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise UsageError(f"{self._folder}: is not ours; remove it, or name another place")

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / key

    def _load(self, key: str, part: slice) -> bytes | None:
        """A part of a block as it was kept, or None; a spoilt block is removed."""
        path = self._path(key)
        try:
            with path.open("rb", buffering=0) as file:
                data = _read_part(file.fileno(), part)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._complain(error)
            return None
        if data is None:
            path.unlink(missing_ok=True)
        return data

    @contextlib.contextmanager
    def _claim(self, key: str) -> Iterator[int | None]:
        """The right to fetch a block, as its locked partial file; None where that cannot be."""
        path = self._path(key + PARTIAL)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            partial = _locked(path)
        except OSError as error:
            self._complain(error)
            yield None
            return
        try:
            yield partial
        finally:
            if _lies_at(partial, path):
                path.unlink(missing_ok=True)
            os.close(partial)

    def _fetched(
        self,
        key: str,
        partial: int | None,
        fetch: Callable[[], Stored],
        is_right: Callable[[Stored], bool],
    ) -> Stored:
        data = fetch()
        self.fetched += 1
        head = NUMBER.pack(len(data)) + _checksums(data)
        room = len(head) + len(data)
        if partial is not None and room < self.limit_bytes * (1 - SPARE) and is_right(data):
            try:
                self._make_room(room)
                os.ftruncate(partial, 0)
                _write(partial, head)
                _write(partial, data)
                self._path(key + PARTIAL).rename(self._path(key))
            except OSError as error:
                self._complain(error)
        return data

    def _make_room(self, size: int) -> None:
        """Count so many bytes as used; where they would be too many, the oldest blocks go."""
        usage = os.open(self._folder / "usage", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(usage, fcntl.LOCK_EX)
            noted = os.pread(usage, NUMBER.size, 0)
            used = NUMBER.unpack(noted)[0] if noted else self.limit_bytes
            if used + size > self.limit_bytes:
                used = self._evict(int(self.limit_bytes * (1 - SPARE)) - size)
            os.pwrite(usage, NUMBER.pack(used + size), 0)
        finally:
            os.close(usage)

    def _evict(self, goal_bytes: int) -> int:
        """Remove the oldest blocks until no more than that is left; how much is left."""
        files = []
        for path in self._folder.glob("??/*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        used = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if used <= goal_bytes:
                break
            if path.suffix != PARTIAL:
                path.unlink(missing_ok=True)
                used -= size
        return used

    def _complain(self, error: OSError) -> None:
        """Say once that the cache does not help."""
        if not self._complained:
            self._complained = True
            log.warning("%s: no help as a cache: %s", self._folder, error.strerror or error)


def _checksums(data: Stored) -> bytes:
    """The CRC-32 of each piece, one behind the other."""
    view = memoryview(data)
    pieces = (view[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))
    return b"".join(zlib.crc32(piece).to_bytes(4, "little") for piece in pieces)


def _read_part(file: int, part: slice) -> bytes | None:
    """The part of the block in that file; None if its checksums say otherwise."""
    noted = os.pread(file, NUMBER.size, 0)
    if len(noted) < NUMBER.size:
        return None
    length = NUMBER.unpack(noted)[0]
    first, stop, _ = part.indices(length)
    low, high = first // PIECE_BYTES, -(-stop // PIECE_BYTES)  # pieces
    start, end = low * PIECE_BYTES, min(high * PIECE_BYTES, length)
    sums = os.pread(file, 4 * (high - low), NUMBER.size + 4 * low)
    data = os.pread(file, end - start, NUMBER.size + 4 * -(-length // PIECE_BYTES) + start)
    if len(data) != end - start or _checksums(data) != sums:
        return None
    return data if (first, stop) == (start, end) else data[first - start : stop - start]


def _locked(path: Path) -> int:
    """The file at that path, made if need be, opened and locked by us alone; or OSError."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _lock(file)
        except OSError:
            os.close(file)
            raise
        if _lies_at(file, path):
            return file
        os.close(file)  # who held it has renamed or removed it: look again


def _lock(file: int) -> None:
    deadline = time.monotonic() + STUCK_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError("another process is stuck with a block") from None
            time.sleep(POLL_SECONDS)


def _lies_at(file: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _write(file: int, data: Stored) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
