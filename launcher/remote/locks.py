"""Locks of a host: a file in /tmp for each, which every account may lock; its owner removes it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time

LOCK_SECONDS = 3.0  # a launch that only looks at the host holds its lock for less
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # there may be a link, or a pipe


def lock(path: str, shared: bool) -> int:
    """Lock a file and return its descriptor, which holds the lock until this process ends.

    Raises OSError when another run holds it, or when it is no plain file.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < deadline:
        descriptor = open_lock(path)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            flock(descriptor, shared)
            # The last holder removes the file: a lock on a removed one excludes no other run.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)
        time.sleep(0.05)
    raise BlockingIOError("another run holds this host; type: ./run-ssh --check HOSTS")


def flock(descriptor: int, shared: bool) -> None:
    """Lock an open file, or raise BlockingIOError at once when it is held."""
    fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def open_lock(path: str) -> int:
    """Open a file that every account may lock and only its owner may change; nothing else will do.

    Another account may have put a link there, or a pipe, whose opening waits for another end.
    """
    while True:
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, _FLAGS)
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
            raise OSError(errno.EINVAL, "is no plain file; have it removed", path)
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL)
            os.fchmod(descriptor, 0o644)  # whatever the umask is
            return descriptor


def remove_lock(path: str, descriptor: int) -> None:
    """Remove the file of a lock that we hold alone, and close it."""
    with contextlib.suppress(OSError):  # others share it, or it is another user's file
        flock(descriptor, shared=False)
        if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            os.unlink(path)
    os.close(descriptor)


def remove_free_locks(locks: list[tuple[str, bool]]) -> None:
    """Remove the files of locks that a killed agent has left, unless another process holds them."""
    for path, _ in locks:
        with contextlib.suppress(OSError):
            remove_lock(path, os.open(path, _FLAGS))
