"""The code that ranks run: the files of a working tree, by content."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UsageError
from launcher.porter import MANIFEST, digest_of, is_program

LARGE_BYTES = 1_000_000_000  # seconds to read, on every host and before every attempt


@dataclass(frozen=True)
class Code:
    """What git tracks in a folder and what it does not ignore, as it lies there now."""

    root: Path
    files: Mapping[str, str]
    """Path below the root -> SHA-256, as `probe.file_digest` makes it."""

    @property
    def programs(self) -> list[str]:
        """Paths of the files that may be executed; what a link leads to is asked for itself."""
        return [path for path in self.files if is_program(os.fspath(self.root / path))]


def code_of(folder: Path, say: Callable[[str], object]) -> Code | None:
    """The code in a folder; None when git does not know it: then there is nothing to compare.

    `say` hears what a user may want to change. Raises UsageError for what cannot be read.
    """
    listing = ["git", "-C", os.fspath(folder), "ls-files", "-z", "--cached", "--others"]
    try:
        told = subprocess.run([*listing, "--exclude-standard"], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    if told.returncode:
        return None
    paths = [path for path in os.fsdecode(told.stdout).split("\0") if path not in ("", MANIFEST)]
    try:
        for remark in oddities(folder, paths):
            say(f"warning: {remark}")
        digests = {path: digest_of(os.fspath(folder / path)) for path in paths}
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
        raise UsageError(f"{reason}; what the ranks do not need belongs into .gitignore") from error
    return Code(folder, {path: digest for path, digest in digests.items() if digest})


def oddities(folder: Path, paths: Sequence[str]) -> list[str]:
    """What is known to be missing from the code, and what is too big to belong to it."""
    remarks = [
        f"{path} is a git repository of its own: hosts are not asked for its files, and --sync"
        " does not bring them"
        for path in paths
        if (folder / path / ".git").exists()
    ]
    sizes = {path: (folder / path).lstat().st_size for path in paths if (folder / path).is_file()}
    if (total := sum(sizes.values())) > LARGE_BYTES:
        biggest = max(sizes, key=sizes.__getitem__)
        size = f"{total / 1e9:.1f} GB of code are compared, of which {biggest} is"
        remarks.append(f"{size} {sizes[biggest] / 1e9:.1f} GB: put it into .gitignore")
    return remarks
