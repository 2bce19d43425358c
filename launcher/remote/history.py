"""What happened to hosts, in a file for each below ~/.rackrun/hosts: a line of JSON per incident.

The launcher keeps them on its machine, and on a host that still answers, so that launches from
other machines know as well. The reader (`launcher/run/incidents.py`) decides what a line means.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time

from launcher.remote.files import contents, write_new

FOLDER = "~/.rackrun/hosts"
MOST_BYTES = 1 << 15
"""Of a file; one that would be longer keeps its newest lines."""
KEPT_BYTES = MOST_BYTES // 2
LOCK_SECONDS = 2.0  # a home on a file server may lock nothing: then the lines are not kept


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
    """Open a file to append to it, locked against others that do."""
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
