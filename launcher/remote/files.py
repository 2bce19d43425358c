"""Files of a host: read whole when they are plain, written new, digested; an agent's own folder.

An agent keeps its files in /tmp/rackrun-RUN-NODE. Any account may make a folder of such a name, so
it counts only if this account owns it and no other may enter it (mode 0700).
"""

from __future__ import annotations

import errno
import os
import stat

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
PIECE_BYTES = 1 << 18
INSTALLED = ".rackrun"
"""Folder in a working directory to which --sync brings an installed rackrun, with its `.venv`."""
PROJECT_LOCK = "uv.lock"

SCRATCH = "/tmp/rackrun-"
_RUN_DIGITS = 32


def contents(path: str, most_bytes: int) -> bytes:
    """Return the bytes of a plain file; raise OSError for links, pipes and what is longer."""
    descriptor = os.open(path, READ)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > most_bytes:
            raise OSError(errno.EINVAL, "is not a file that rackrun has written", path)
        return file.read(most_bytes)


def checked_path(path: str) -> str:
    """Return a path that stays below its folder; raise OSError for any other."""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        encoded = b""
    if b"\0" in encoded or {b"", b".", b".."} & set(encoded.split(b"/")):
        raise OSError(errno.EINVAL, "is not the name of a file below the folder", path)
    return path


def path_below(root: str, path: str) -> str:
    """Return where a path below a folder lies; raise OSError where a link would lead elsewhere."""
    absolute = os.path.join(os.path.realpath(root), checked_path(path))
    folder = os.path.dirname(absolute)
    is_file = os.path.exists(folder) and not os.path.isdir(folder)
    if is_file or os.path.realpath(folder) != folder:
        raise OSError(errno.ENOTDIR, "a link or a file is where a folder should be", path)
    return absolute


def project_python(workdir: str) -> str:
    """Return where uv keeps the interpreter of a project with a uv.lock; empty for any other."""
    if not os.path.isfile(os.path.join(workdir, PROJECT_LOCK)):
        return ""
    folder = os.environ.get("UV_PROJECT_ENVIRONMENT") or ".venv"
    return os.path.join(workdir, folder, "bin", "python")


def write_new(path: str, data: bytes) -> None:
    """Write a new file that only this account can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)


def file_digest(path: str) -> str:
    """Return the SHA-256 of a file, or of a link's target; empty when there is neither."""
    import hashlib  # 3 ms that agent and shim spare

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
    """Return the reason of an error, after the name of its file if that is known."""
    where = error.filename
    name = os.fsencode(where).decode("utf-8", "replace") if isinstance(where, (str, bytes)) else ""
    return f"{name}: {error.strerror or error}".lstrip(": ")


# -- the folder of an agent


def is_scratch(path: str) -> bool:
    """Return True for a path that an agent's folder may have."""
    run, _, node = path[len(SCRATCH) :].rpartition("-")
    is_hex = len(run) == _RUN_DIGITS and not set(run) - set("0123456789abcdef")
    return path.startswith(SCRATCH) and is_hex and node.isascii() and node.isdecimal()


def is_own_folder(scratch: str) -> bool:
    """Return True for an agent's folder that this account has made, and no other may enter."""
    if not is_scratch(scratch):
        return False
    try:
        status = os.lstat(scratch)
    except OSError:
        return False
    private = stat.S_ISDIR(status.st_mode) and status.st_mode & 0o777 == 0o700
    return private and status.st_uid == os.getuid()


def remove_folder(path: str) -> None:
    """Remove an agent's folder of this account and all that is in it; keep any other folder."""
    if is_own_folder(path):
        import shutil  # 5 ms that a shim spares: an agent lives, and removes the folder

        shutil.rmtree(path, ignore_errors=True)
