"""Locks of a host: a file in /tmp for each, which every account may lock; its owner removes it.

A launch that waits holds a ticket: a locked file beside the lock. The kernel unlocks it when the
launch dies, so the oldest ticket that is still locked is the next to be served.

Where the owner of a file shared its lock with another account that ended last, the file stays,
empty and unlocked: /tmp is sticky. The owner's next launch on the host removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time

SIGNATURE_BYTES = 1 << 12
LOCK_SECONDS = 3.0  # a launch that only looks at the host holds its lock for less
HOLD_SECONDS = 0.3  # removing a free lock takes it for a moment
TICKET = ".wait-"
HELD: dict[str, int] = {}
"""Locks and tickets that a probe holds, path -> descriptor; the agent of its process goes on."""

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # there may be a link, or a pipe


def lock_path(name: str) -> tuple[str, str]:
    """Return the file that runs on this host lock: in /tmp, which all accounts share.

    Any account may put there what cannot be locked, and no other account may remove it: it is
    returned, too. The launches of this account then exclude one another by a file in its home, and
    no longer those of others.
    """
    path = f"/tmp/rackrun-{name}.lock"
    folder, start = os.path.split(path)
    for file in os.listdir(folder):
        planted = os.path.join(folder, file)
        if file.startswith(start) and TICKET not in file and not _is_lockable(planted):
            home = os.path.expanduser("~/.rackrun")
            os.makedirs(home, mode=0o700, exist_ok=True)
            return os.path.join(home, os.path.basename(path)), planted
    return path, ""


def _is_lockable(path: str) -> bool:
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        return error.errno == errno.ENOENT  # it has just been removed
    is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    os.close(descriptor)
    return is_file


def lock(path: str, shared: bool, seconds: float = LOCK_SECONDS) -> int:
    """Lock a file and return its descriptor, which holds the lock until this process ends.

    A lock that the probe before us holds stays locked, so that no other launch comes in between.
    Raise OSError when another run holds it for longer, or when it is not a plain file.
    """
    held = HELD.pop(path, None)
    if held is not None:
        if _lies_at(held, path):
            return held
        os.close(held)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        descriptor = open_lock(path)
        with contextlib.suppress(BlockingIOError):
            flock(descriptor, shared)
            # The last holder removes the file, and a lock on a removed file excludes no other run.
            if _lies_at(descriptor, path):
                return descriptor
        os.close(descriptor)
        time.sleep(0.05)
    raise BlockingIOError("another run holds this host; type --wait, or --check to see which")


def hold(path: str, shared: bool) -> bool:
    """Lock a file until the end of this program; return whether no other process holds it.

    Raise OSError when it is not a plain file.
    """
    try:
        HELD[path] = lock(path, shared, HOLD_SECONDS)
    except BlockingIOError:
        return False
    return True


def sign(path: str, descriptor: int, run: str, name: str) -> None:
    """Write into an exclusive lock which run holds it, for launches that find it locked."""
    with contextlib.suppress(OSError):  # another user's file, or a full disk: locked all the same
        writing = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if os.path.samestat(os.fstat(writing), os.fstat(descriptor)):
                os.ftruncate(writing, 0)
                os.write(writing, json.dumps({"run": run, "name": name}).encode())
        finally:
            os.close(writing)


def signature(path: str, owner: int) -> tuple[str, str]:
    """Return run and name from a lock that this owner has written; empty where there is none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        descriptor = os.open(path, _FLAGS)
        try:
            fields = json.loads(os.read(descriptor, SIGNATURE_BYTES))
            is_theirs = os.fstat(descriptor).st_uid == owner
        finally:
            os.close(descriptor)
        if is_theirs and isinstance(fields, dict):
            run, name = str(fields.get("run")), str(fields.get("name"))
            if re.fullmatch("[0-9a-f]{32}", run) and re.fullmatch("[A-Za-z0-9._-]{1,255}", name):
                return run, name
    return "", ""


def take_ticket(path: str, turn: str) -> tuple[str, int]:
    """Queue for a lock; return the ticket and its descriptor, which holds the place in the queue.

    A launch may ask two probes on a host, each with a ticket for its turn: the process id keeps
    them apart.
    """
    ticket = f"{path}{TICKET}{turn}-{os.getpid()}"
    return ticket, HELD[ticket] if ticket in HELD else lock(ticket, shared=False)


def queue(path: str, parts: list[str], turn: str) -> None:
    """Hold a ticket for each of these parts of a host, and for no other."""
    for ticket in [held for held in HELD if TICKET in held and not os.path.exists(held)]:
        os.close(HELD.pop(ticket))  # a cleaner of /tmp was there
    tickets = dict(take_ticket(path + part, turn) for part in parts)
    for ticket in [held for held in HELD if TICKET in held and held not in tickets]:
        remove_lock(ticket, HELD.pop(ticket))
    HELD.update(tickets)


def first_in_line(path: str, parts: list[str], turn: str) -> str:
    """Return the first ticket before a turn, for these parts of a lock; empty when there is none.

    The lock of a whole host excludes all of its parts, and each part the whole host.
    """
    folder, name = os.path.split(path)
    line = []
    for file in os.listdir(folder) if turn else ():
        lock_name, mark, ahead = file.partition(TICKET)
        part = lock_name[len(name) :]
        concerns_us = "" in parts or part in ("", *parts)
        counts = mark and ahead < turn
        if counts and lock_name.startswith(name) and concerns_us:
            line.append((ahead, os.path.join(folder, file)))
    return next((ticket for _, ticket in sorted(line) if is_held(ticket)), "")


def is_held(path: str) -> bool:
    """Return whether a process holds a lock; remove the file when none does."""
    with contextlib.suppress(OSError):  # it has just gone, or is not a lock
        descriptor = os.open(path, _FLAGS)
        try:
            flock(descriptor, shared=True)
        except BlockingIOError:
            os.close(descriptor)
            return True
        remove_lock(path, descriptor)
    return False


def flock(descriptor: int, shared: bool) -> None:
    """Lock an open file, or raise BlockingIOError at once when it is held."""
    fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def open_lock(path: str) -> int:
    """Open a plain file that every account may lock and only its owner may change.

    Another account may have put a link there, or a pipe, whose opening waits for another end.
    """
    while True:
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, _FLAGS)
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
            raise OSError(errno.EINVAL, "is not a plain file; have it removed", path)
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL)
            os.fchmod(descriptor, 0o644)  # whatever the umask is
            return descriptor


def _lies_at(descriptor: int, path: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False


def remove_lock(path: str, descriptor: int) -> None:
    """Remove the file of a lock, unless others hold it too, and close it.

    Root could also remove a pipe that another account has put there, which is no lock of a run.
    """
    with contextlib.suppress(OSError):  # others share it, or it is another user's file
        flock(descriptor, shared=False)
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and _lies_at(descriptor, path):
            os.unlink(path)
    os.close(descriptor)


def release() -> None:
    """Remove all locks and tickets of this program, but for those that others share."""
    while HELD:
        remove_lock(*HELD.popitem())


def remove_free_locks(locks: list[tuple[str, bool]]) -> None:
    """Remove the files of locks that a killed agent has left, unless another process holds them."""
    for path, _ in locks:
        with contextlib.suppress(OSError):
            remove_lock(path, os.open(path, _FLAGS))
