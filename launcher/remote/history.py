"""What is remembered about a host: incidents of its past, and notes that it is not to be used.

Incidents lie below ~/.rackrun/hosts, a file for each host with a line of JSON per incident. The
launcher keeps them on its machine, and on a host that still answers, so that launches from other
machines know as well.

A note for other accounts is a file beside the lock, NAME.lock.drained-UID, owned by that UID: so no
account can write in another's name. The readers (`launcher/run/incidents.py`, the preflight)
decide what a line or a note is worth: only root's note keeps a launch away.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from typing import Any

from launcher.remote.files import contents, write_new
from launcher.remote.holders import user_name

FOLDER = "~/.rackrun/hosts"
MOST_BYTES = 1 << 15
"""Of a file; one that would be longer keeps its newest lines."""
KEPT_BYTES = MOST_BYTES // 2
LOCK_SECONDS = 2.0  # a home on a file server may lock nothing: then the lines are not kept

NOTE = ".drained-"
NOTE_BYTES = 1 << 12
NOTE_LETTERS = 300
MOST_NOTES = 16
MOST_SECONDS = 10**11  # since 1970


def path_of(host: str) -> str:
    """Return the file of a host, by the name that hosts.txt gives it."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", host)[:200]
    return os.path.join(os.path.expanduser(FOLDER), f"{name}.jsonl")


def read(host: str) -> str:
    """Return the lines about a host; none where there are none, or where they cannot be read."""
    with contextlib.suppress(OSError):
        return contents(path_of(host), MOST_BYTES).decode(errors="replace")
    return ""


def append(host: str, lines: str) -> None:
    """Add lines to those about a host; raise OSError where that is not possible."""
    path, data = path_of(host), lines.encode()[-KEPT_BYTES:]
    folder = os.path.dirname(path)
    for closed in (os.path.dirname(folder), folder):  # one by one: the mode of parents is the usual
        os.makedirs(closed, mode=0o700, exist_ok=True)
    descriptor = _locked(path)
    try:
        if os.fstat(descriptor).st_size + len(data) <= MOST_BYTES:
            os.write(descriptor, data)
            return
        newest = contents(path, 2 * MOST_BYTES)[-(MOST_BYTES - KEPT_BYTES) :].partition(b"\n")[2]
        partial = f"{path}.{os.getpid()}.partial"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        write_new(partial, newest + data)
        os.rename(partial, path)
    finally:
        os.close(descriptor)


def _locked(path: str) -> int:
    deadline = time.monotonic() + LOCK_SECONDS
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        descriptor = os.open(path, flags, 0o600)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):  # not replaced meanwhile
                return descriptor
        os.close(descriptor)
        if time.monotonic() > deadline:
            raise BlockingIOError("another program writes there")
        time.sleep(0.02)


# -- notes for other accounts


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
                # any account may write one, and none may make our reply malformed
                text = str(note.get("text"))[:NOTE_LETTERS].encode(errors="replace").decode()
                at = max(0, min(int(note.get("at", 0)), MOST_SECONDS))
                read.append({"uid": uid, "user": user_name(uid), "text": text, "at": at})
    return read


def put_note(lock: str, text: str, at: float) -> None:
    """Leave a note for other accounts, or take it away if there is no text; raise OSError."""
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
        error.filename = path  # a write to a full disk names no file
        raise
