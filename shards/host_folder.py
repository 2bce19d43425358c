"""This account's own folders on a host, for what its processes share: shards and indexes."""

import fcntl
import mmap
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rackrun.atomic import partials, write_whole
from rackrun.errors import SaveError, UsageError

KEPT_SECONDS = 7 * 86400.0  # an index that was fetched; older ones go when another one comes
WAIT_SECONDS = 60.0  # for another process, whose server may be slow, or which may be stopped
POLL_SECONDS = 0.05

Bytes = bytes | mmap.mmap


def own_folder(folder: Path) -> Path:
    """Return this account's own folder in a folder that others may write to as well.

    UsageError if no folder can be made there that only this account may write to.
    """
    own = folder / f"rackrun-cache-{os.getuid()}"
    try:
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = own.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise UsageError(f"{own}: not a folder of this account; name another one")
        if status.st_mode & 0o022:
            own.chmod(0o700)
    except OSError as error:
        raise UsageError(f"{own}: no place for a cache: {error.strerror}") from None
    return own


def kept_index(name: str, fetch: Callable[[], bytes], again: bool) -> Bytes:
    """Return the bytes of an index of a server, from memory that the processes of a host share.

    The first one fetches it into a file of that name in the folder for temporary files; `again`:
    also if it is there. Where no file can be written, each process has bytes of its own.
    """
    try:
        path = own_folder(Path(tempfile.gettempdir())) / name
    except UsageError:
        return fetch()
    # The lock only spares the server: two that fetch the same index both have a whole one.
    deadline = time.monotonic() + WAIT_SECONDS
    with alone(path.parent, lambda: path.exists() and not again or time.monotonic() > deadline):
        if not again:
            with suppress(OSError):  # it is not there
                return mapped(path)
        data = fetch()
        _remove_old(path.parent)
        with suppress(OSError, SaveError):  # the disk is full
            write_whole(path, data, 0o600)
            return mapped(path)
        return data


def mapped(path: Path) -> Bytes:
    """Return a file's bytes without reading them: processes that map it share the memory."""
    with path.open("rb") as file:
        return mapped_file(file.fileno())


def mapped_file(descriptor: int) -> Bytes:
    """Return the same of an open file."""
    size = os.fstat(descriptor).st_size
    return mmap.mmap(descriptor, size, prot=mmap.PROT_READ) if size else b""


def _remove_old(folder: Path) -> None:
    for path in (*folder.glob("*.npy"), *partials(folder)):  # and what a kill has left
        with suppress(OSError):  # another process was faster
            if time.time() - path.stat().st_mtime > KEPT_SECONDS:
                path.unlink()


@contextmanager
def alone(folder: Path, gives_up: Callable[[], bool]) -> Iterator[bool]:
    """Wait until no other process does the same in a folder; yield False if it gives up.

    The lock ends with the process that holds it.
    """
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            while not (is_alone := locked(file, fcntl.LOCK_EX)) and not gives_up():
                time.sleep(POLL_SECONDS)
        except OSError:  # a file system without locks
            is_alone = False
        yield is_alone
    finally:
        os.close(file)


def locked(file: int, kind: int) -> bool:
    """Take a lock; return False if another process has it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
