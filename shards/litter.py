"""Files and folders below those of a user that are not meant: hidden, or of the system."""

import re

HIDDEN = re.compile(r"(?:^|/)(?:__MACOSX(?:/|$)|\.(?!\.?/))")  # . and .. are not
SYSTEM_FOLDERS = (  # which a NAS (Synology, QNAP), a file system, Windows or macOS makes unasked
    *("@eaDir", "@tmp", "#recycle", "#snapshot", "@Recycle", "@Recently-Snapshot", "@__thumb"),
    *("lost+found", "FOUND.000", "$RECYCLE.BIN", "RECYCLER", "System Volume Information"),
    *("Network Trash Folder", "Temporary Items"),
)
SYSTEM = re.compile(rf"(?:^|/)(?:{'|'.join(map(re.escape, SYSTEM_FOLDERS))})(?=/|$)", re.IGNORECASE)


def system_folder(name: str) -> str:
    """Return the folder of the system that a path leads to or through; empty if it does not."""
    match = SYSTEM.search(name)
    return name[: match.end()] if match else ""
