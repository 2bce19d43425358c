"""Notes on a host for other accounts: why it is not to be used.

A note is a file beside the lock, NAME.lock.drained-UID, which has that owner: so no account can
write in another's name. Who reads it decides what it is worth: only root's keeps a launch away.
"""

from __future__ import annotations

import contextlib
import json
import os

from launcher.remote.files import contents
from launcher.remote.holders import user_name

TYPE_CHECKING = False  # programs for hosts start sooner without typing
if TYPE_CHECKING:
    from typing import Any

NOTE = ".drained-"
NOTE_BYTES = 1 << 12
LETTERS = 300
MOST_NOTES = 16
MOST_SECONDS = 10**11  # since 1970


def notes(lock: str) -> list[dict[str, Any]]:
    """Return the notes of other accounts that this host is not to be used."""
    folder, name = os.path.split(lock)
    start = name + NOTE
    owners = [file[len(start) :] for file in os.listdir(folder) if file.startswith(start)]
    uids = sorted(int(owner) for owner in owners if owner.isascii() and owner.isdecimal())
    read = []
    for uid in uids[:MOST_NOTES]:
        with contextlib.suppress(OSError, ValueError, RecursionError, OverflowError):
            path = os.path.join(folder, f"{start}{uid}")
            note = json.loads(contents(path, NOTE_BYTES))
            if os.lstat(path).st_uid == uid != os.getuid() and isinstance(note, dict):
                # any account may write one, and none may make our answer a malformed one
                text = str(note.get("text"))[:LETTERS].encode(errors="replace").decode()
                at = max(0, min(int(note.get("at", 0)), MOST_SECONDS))
                read.append({"uid": uid, "user": user_name(uid), "text": text, "at": at})
    return read


def put_note(lock: str, text: str, at: float) -> str:
    """Leave a note for other accounts, or take it away if there is no text; return why not."""
    path = f"{lock}{NOTE}{os.getuid()}"
    try:
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(path).st_uid == os.getuid():
                os.unlink(path)
        if text:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
            with open(descriptor, "w") as file:
                os.fchmod(descriptor, 0o644)  # whatever the umask is
                json.dump({"text": text, "at": at}, file)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""
