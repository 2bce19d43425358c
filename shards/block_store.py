"""Store blocks in a folder under their keys, for every process of this user on the machine.

The file of a block has the CRC-32 of each 128 KiB, then the bytes. A part of a block can be read
and verified without the rest; readers that verify it themselves ask for that only after bytes that
were wrong.

A killed process leaves nothing to repair: a block gets its name when it is complete, and the locks
are the kernel's and end with their holder. Files are not synced to the disk, so a power cut may
leave a file empty, short, full of zeros, or with bytes of another one. No file is trusted: readers
know the length of a block, and each checksum covers its key and position, so that only the right
bytes at the right offset pass. Anything else is removed and fetched again. If the folder cannot be
written to, a warning is logged once, and everything is fetched.
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

from rackrun.errors import UsageError
from rackrun.machine import boot_id
from rackrun.shards.source import Stored

PIECE_BYTES = 128 << 10
USAGE = struct.Struct("<QI")  # the file `usage`: the bytes of all blocks, and their CRC-32
SPARE = 0.05  # of the limit is made free at once: finding the oldest blocks takes a while
PARTIAL = ".partial"
# Whatever lies there: a pipe does not block the reader, and a link is not followed.
READING = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
STUCK_SECONDS = 150.0  # more than a fetch takes: who holds a lock longer has been stopped
POLL_SECONDS = 0.01

log = logging.getLogger(__name__)


class BlockStore:
    """Blocks of bytes by key: `get_or_fetch` fetches a missing block once for all processes.

    Raises UsageError if no folder can be made that only this user may write to.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.hits = 0  # blocks that were here
        self.fetched = 0  # blocks that were not
        self._warned = False
        # A folder of its own for each user, because others may write to /tmp and the like, too.
        self._folder = folder / f"rackrun-cache-{os.getuid()}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self._folder.lstat()
        except OSError as error:
            raise UsageError(f"{self._folder}: no place for a cache: {error.strerror}") from None
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise UsageError(f"{self._folder}: not a folder of this account; name another one")

    def get_or_fetch(
        self,
        key: str,
        length: int,
        part: slice,
        fetch: Callable[[], Stored],
        is_right: Callable[[Stored], bool],
        verify: bool = True,
    ) -> Stored:
        """Return a part of a block; fetch the block if necessary, and store it if it is correct."""
        data = self.load(key, length, part, verify)
        if data is None:
            with self._claim(key) as partial:
                data = self.load(key, length, part, verify)  # another process may have fetched it
                if data is None:
                    return self._fetched(key, length, partial, fetch, is_right)[part]
        self.hits += 1
        return data

    def forget(self, prefix: str) -> None:
        """Remove every block whose key begins so."""
        for path in self._path(prefix).parent.glob(f"{prefix}*"):
            path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / key

    def has(self, key: str, length: int) -> bool:
        """Return True if a block is here, by its size; what is in it shows when it is used."""
        try:
            return self._path(key).stat().st_size == length + _sums_bytes(length)
        except OSError:
            return False

    def load(self, key: str, length: int, part: slice, verify: bool = True) -> bytes | None:
        """Return a part of a stored block, or None; a damaged file is removed.

        Without `verify`, only its size is looked at.
        """
        path = self._path(key)
        try:
            file = os.open(path, READING)
            try:
                data = _part(file, key, length, part, verify)
            finally:
                os.close(file)
            if data is None:
                path.unlink(missing_ok=True)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn_once(error)
            return None
        return data

    @contextlib.contextmanager
    def opened(self, key: str, length: int) -> Iterator[tuple[int, int] | None]:
        """Give a stored block, not verified, as descriptor and offset of its bytes; else None."""
        try:
            file = os.open(self._path(key), READING)
        except OSError:
            yield None
            return
        try:
            sums = _sums_bytes(length)
            yield (file, sums) if os.fstat(file).st_size == sums + length else None
        finally:
            os.close(file)

    @contextlib.contextmanager
    def _claim(self, key: str) -> Iterator[int | None]:
        """Give the right to fetch a block, as its locked partial file; None if that fails."""
        path = self._path(key + PARTIAL)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            partial = _locked(path)
        except OSError as error:
            self._warn_once(error)
            yield None
            return
        try:
            yield partial
        finally:
            if _lies_at(partial, path):  # not renamed: the fetch has failed
                path.unlink(missing_ok=True)
            os.close(partial)

    def _fetched(
        self,
        key: str,
        length: int,
        partial: int | None,
        fetch: Callable[[], Stored],
        is_right: Callable[[Stored], bool],
    ) -> Stored:
        data = fetch()
        self.fetched += 1
        head = _checksums(key, data)
        room = len(head) + len(data)
        # A block that leaves no room for others would only empty the cache.
        keeps = len(data) == length and room < self.limit_bytes * (1 - SPARE)
        if partial is not None and keeps and is_right(data):
            try:
                self._make_room(room)
                os.ftruncate(partial, 0)  # of a process that was killed while it wrote
                _write(partial, head)
                _write(partial, data)
                self._path(key + PARTIAL).rename(self._path(key))
            except OSError as error:
                self._warn_once(error)
        return data

    def _make_room(self, size: int) -> None:
        """Count `size` bytes as used; above the limit, remove the oldest blocks."""
        usage = os.open(self._folder / "usage", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(usage, fcntl.LOCK_EX)
            noted = os.pread(usage, USAGE.size + 1, 0)
            used = int.from_bytes(noted[:8], "little")
            if noted != _note(used):  # damaged, or of another boot: find out what is there
                used = self.limit_bytes
            if used + size > self.limit_bytes:
                used = self._evict(int(self.limit_bytes * (1 - SPARE)) - size)
            os.pwrite(usage, _note(used + size), 0)
            os.ftruncate(usage, USAGE.size)
        finally:
            os.close(usage)

    def _evict(self, goal_bytes: int) -> int:
        """Remove the oldest blocks until no more than that is left; return how much is left."""
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

    def _warn_once(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s: no help as a cache: %s", self._folder, error.strerror or error)


def _checksums(key: str, data: Stored, first: int = 0) -> bytes:
    """Return the CRC-32 of each piece, joined; `first` is the number of the first piece."""
    view, start = memoryview(data), zlib.crc32(key.encode()) + first
    pieces = (view[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))
    return b"".join(
        zlib.crc32(piece, (start + number) & 0xFFFFFFFF).to_bytes(4, "little")
        for number, piece in enumerate(pieces)
    )


def _sums_bytes(length: int) -> int:
    return 4 * -(-length // PIECE_BYTES)


def _part(file: int, key: str, length: int, part: slice, verify: bool) -> bytes | None:
    """Return the part of the block in that file; None if its size or a checksum is wrong."""
    sums_length = _sums_bytes(length)
    if os.fstat(file).st_size != sums_length + length:
        return None
    first, stop, _ = part.indices(length)
    low, high = first // PIECE_BYTES, -(-stop // PIECE_BYTES)  # the pieces that it touches
    # A checksum is of a whole piece, so that verifying a part means reading a little more.
    start, end = (low * PIECE_BYTES, min(high * PIECE_BYTES, length)) if verify else (first, stop)
    data = os.pread(file, end - start, sums_length + start)
    if len(data) != end - start:
        return None
    if verify and _checksums(key, data, low) != os.pread(file, 4 * (high - low), 4 * low):
        return None
    return data if (first, stop) == (start, end) else data[first - start : stop - start]


def _note(used: int) -> bytes:
    """Return the content of the file `usage` for that many bytes, valid during this boot.

    After another one it may be older than the files.
    """
    return USAGE.pack(used, zlib.crc32(used.to_bytes(8, "little") + boot_id().encode()))


def _locked(path: Path) -> int:
    """Return the file at that path, made if need be, under an exclusive lock; or OSError."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _lock(file)
        except OSError:
            os.close(file)
            raise
        if _lies_at(file, path):
            return file
        os.close(file)  # its holder has renamed or removed it: look again


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
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _write(file: int, data: Stored) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
