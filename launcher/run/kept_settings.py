"""The settings files that launchers of this account wrote: `rerun` obeys these, and no others.

A run folder proves nothing about its run.toml. Hosts that share its disk write there as this
account, with any owner and mode, and a folder may come from elsewhere. So the launcher keeps each
settings file outside of all run folders, under its digest, and run.toml counts as far as it is one
of these, byte for byte.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

from rackrun.atomic import translated_os_errors, write_whole
from rackrun.errors import SaveError
from rackrun.runs import make_private

FOLDER = Path("~/.rackrun/settings")
KEPT_SECONDS = 366 * 86400.0  # since a run with them was started


def keep_settings(text: str) -> str:
    """Keep a settings file; return its digest.

    A home directory that cannot be written to costs only `rerun`, which then reports it.
    """
    data = text.encode()
    digest = hashlib.sha256(data).hexdigest()
    path = _path_of(digest)
    with suppress(SaveError), translated_os_errors(path):
        try:
            os.utime(path)
        except FileNotFoundError:
            make_private(path.parent)
            _forget_old(path.parent)
            write_whole(path, data, mode=0o600)  # has --env values
    return digest


def kept_settings(digest: str) -> Path | None:
    """Return the settings file of a digest; None if no launcher of this account wrote it here."""
    path = _path_of(digest)
    with suppress(OSError):
        if hashlib.sha256(path.read_bytes()).hexdigest() == digest:
            return path
    return None


def digest_of(settings: Path) -> str:
    """Return the digest of a settings file; raise OSError if it cannot be read."""
    return hashlib.sha256(settings.read_bytes()).hexdigest()


def _path_of(digest: str) -> Path:
    return FOLDER.expanduser() / f"{digest}.toml"


def _forget_old(folder: Path) -> None:
    for path in folder.glob("*.toml"):
        if time.time() - path.stat().st_mtime > KEPT_SECONDS:
            path.unlink(missing_ok=True)
