"""The git revision of the code in a folder; only what needs it pays for importing `subprocess`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

GIT_SECONDS = 10.0  # a folder on a network disk may be slow
DESCRIBE = (
    *("-c", "core.fsmonitor=false"),  # a setting of the folder, which may name a program
    *("describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+dirty"),
)


def git_commit(folder: Path) -> str:
    """Return the commit of a folder, with "+dirty" when tracked files changed; "" if unknown."""
    command = ["git", "-C", os.fspath(folder), *DESCRIBE]
    try:
        completed = subprocess.run(command, capture_output=True, check=False, timeout=GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if completed.returncode else completed.stdout.decode(errors="replace").strip()
