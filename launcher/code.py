"""The code that ranks run: the files of a working tree, by content."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.porter import MANIFEST


@dataclass(frozen=True)
class Code:
    """What git tracks in a folder and what it does not ignore, as it lies there now."""

    root: Path
    files: Mapping[str, str]
    """Path below the root -> SHA-256, as `probe.file_digest` makes it."""

    @property
    def programs(self) -> list[str]:
        """Paths of the files that may be executed; what a link leads to is asked for itself."""
        return [path for path in self.files if is_program(self.root / path)]


def is_program(path: Path) -> bool:
    """Whether a file may be executed by its owner, which is all that git remembers of its mode."""
    mode = path.lstat().st_mode
    return stat.S_ISREG(mode) and bool(mode & stat.S_IXUSR)


def code_of(folder: Path) -> Code | None:
    """The code in a folder; None when git does not know it: then there is nothing to compare."""
    listing = ["git", "-C", os.fspath(folder), "ls-files", "-z", "--cached", "--others"]
    try:
        told = subprocess.run([*listing, "--exclude-standard"], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    if told.returncode:
        return None
    paths = [path for path in os.fsdecode(told.stdout).split("\0") if path not in ("", MANIFEST)]
    digests = {path: digest for path in paths if (digest := _digest(folder / path))}
    return Code(folder, digests)


def _digest(path: Path) -> str:
    """SHA-256 of a file's content; of a link's target, marked as one; empty for a missing file."""
    if path.is_symlink():
        return hashlib.sha256(b"link " + os.fsencode(path.readlink())).hexdigest()
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
