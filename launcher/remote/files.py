"""Files of a host: read whole when they are plain, written new, and digested."""

from __future__ import annotations

import errno
import os
import stat

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
PIECE_BYTES = 1 << 18
INSTALLED = ".rackrun"
"""Folder in a working directory to which --sync brings an installed rackrun, with its `.venv`."""


def contents(path: str, most_bytes: int) -> bytes:
    """Return the bytes of a plain file; raises OSError for links, pipes and what is longer."""
    descriptor = os.open(path, READ)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most_bytes:
            raise OSError(errno.EINVAL, "is not what we have written", path)
        return file.read(most_bytes)


def write_new(path: str, data: bytes) -> None:
    """Write a new file that only this account can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)


def file_digest(path: str) -> str:
    """Return the SHA-256 of a file, or of a link's target; empty when there is neither."""
    import hashlib  # loads OpenSSL, which few programs need

    if os.path.islink(path):
        return hashlib.sha256(b"link " + os.fsencode(os.readlink(path))).hexdigest()
    if not os.path.isfile(path):
        return ""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(PIECE_BYTES), b""):
            digest.update(piece)
    return digest.hexdigest()


def explained(error: OSError) -> str:
    """Return what went wrong, after the name of the file if one is known."""
    where = error.filename
    name = os.fsencode(where).decode("utf-8", "replace") if isinstance(where, (str, bytes)) else ""
    return f"{name}: {error.strerror or error}".lstrip(": ")
