"""Write files, and lines at their end, that appear whole or not at all."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rackrun.errors import SaveError

BUFFER_BYTES = 1 << 20
PARTIAL = ".partial"
FULL = (errno.ENOSPC, errno.EDQUOT)
NO_PLACE = (errno.ENOENT, errno.ENOTDIR, errno.EROFS, errno.EACCES)


@contextlib.contextmanager
def atomic_write(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a file next to `path` that gets its name only if the block ends without an error.

    The file is on the disk before it is renamed, and the name before the block ends. An error or an
    interrupt leaves nothing, a kill a hidden partial file. Two processes may write the same file:
    the later rename wins, and both files are complete. The umask applies to `mode`. Write within
    `translated_os_errors(path)`, which turns a full disk into a SaveError.
    """
    partial = partial_path(path)
    try:
        with translated_os_errors(path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.fdopen(os.open(partial, flags, mode), "wb", buffering=BUFFER_BYTES)
        try:
            yield file
            with translated_os_errors(path):
                file.flush()
                os.fsync(file.fileno())
        finally:
            with translated_os_errors(path):  # closing flushes, which may fail once more
                file.close()
        with translated_os_errors(path):
            partial.rename(path)
            sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a small file whole or not at all; an old one under that name is replaced."""
    with atomic_write(path, mode) as file, translated_os_errors(path):
        file.write(data)


def append_whole(descriptor: int, data: bytes) -> bool:
    """Append to a file, all or nothing; return False where its disk takes no more."""
    size = os.fstat(descriptor).st_size
    with contextlib.suppress(OSError):
        if os.write(descriptor, data) == len(data):
            return True
    with contextlib.suppress(OSError):  # half a line would spoil the next one
        os.ftruncate(descriptor, size)
    return False


def partial_path(path: Path) -> Path:
    """Return a unique name for an incomplete file, hidden so that no server shows it."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def partials(folder: Path) -> list[Path]:
    """Return the partial files that killed writers have left in a folder."""
    return sorted(folder.glob(f".*{PARTIAL}"))


def written_for(partial: Path) -> str:
    """Return the final name of a partial file."""
    return partial.name[1:].rsplit(".", 2)[0]


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk: a rename alone does not survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def translated_os_errors(path: Path) -> Iterator[None]:
    """Turn an OSError from writing `path` into a SaveError."""
    try:
        yield
    except OSError as error:
        room = _room(path) if error.errno in FULL else ""
        hint = "; name another folder" if error.errno in NO_PLACE else ""
        raise SaveError(f"{path}: cannot be written: {error.strerror}{room}{hint}") from error


def _room(path: Path) -> str:
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError:
        return ""
    return f" ({free / 1e6:,.0f} MB free there); make room"
