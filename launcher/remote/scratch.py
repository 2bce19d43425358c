"""The private folder of an agent, /tmp/rackrun-RUN-NODE: made, recognised, read and removed.

Any account may make a folder of such a name, so it counts only with our owner and mode 0700.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat

from launcher.remote.files import contents

TYPE_CHECKING = False  # programs for hosts start sooner without typing
if TYPE_CHECKING:
    from typing import Any

SCRATCH = "/tmp/rackrun-"
IDENTITY_BYTES = 1 << 12  # more than any agent writes about itself
_RUN_DIGITS = 32


def is_scratch(path: str) -> bool:
    """Return whether a path is that of an agent's private folder."""
    run, _, node = path[len(SCRATCH) :].rpartition("-")
    is_hex = len(run) == _RUN_DIGITS and not set(run) - set("0123456789abcdef")
    return path.startswith(SCRATCH) and is_hex and node.isascii() and node.isdecimal()


def is_ours(scratch: str) -> bool:
    """Return whether a private folder was made by this account."""
    if not is_scratch(scratch):
        return False
    try:
        found = os.lstat(scratch)
    except OSError:
        return False
    private = stat.S_ISDIR(found.st_mode) and found.st_mode & 0o777 == 0o700
    return private and found.st_uid == os.getuid()


def identities_in(scratch: str) -> tuple[list[int], list[int]]:
    """Return the identities of a run's agent and guard; both empty when the folder has none."""
    known: Any = None
    if is_ours(scratch):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            known = json.loads(contents(f"{scratch}/agent.pid", IDENTITY_BYTES))
    if not isinstance(known, list) or not all(type(number) is int for number in known[:4]):
        return [], []
    return known[:2], known[2:4]


def remove_folder(path: str) -> None:
    """Remove a private folder of this account and all that is in it; other folders stay."""
    import shutil  # costs as much as the start of Python, and is needed at the end only

    if is_ours(path):
        shutil.rmtree(path, ignore_errors=True)
