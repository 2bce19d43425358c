"""Locks of a host, and the launches that wait for it: files in /tmp, which all accounts share.

    rackrun-NAME.lock             held alone by a run on the whole host, shared by runs on parts
    rackrun-NAME.lock.gpu3        held alone by a run on GPU 3
    rackrun-NAME.lock.wait-TURN   a launch waits for the host; it touches the file at each look
    rackrun-NAME.lock.gpu3.wait-TURN   the same for GPU 3

Lock files stay, with a mode that lets every account lock them. Who holds one alone writes into it
who that is; without a lock, the text means nothing. The kernel unlocks a file when its process
ends, however that happens. A ticket that was not touched for a minute is that of a dead launch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import re
import stat
import time
from typing import Any

LOCK_SECONDS = 3.0  # a launch that only looks at the host holds its lock for less
HOLD_SECONDS = 0.3
DEAD_SECONDS = 60.0
"""A launch that waits touches its tickets every 5 seconds."""
HOLDER_BYTES = 1 << 12
HOLDER_TEXTS = {
    "user": r"[^\0-\x1f\ud800-\udfff]{1,255}",
    "run": r"([0-9a-f]{32})?",
    "name": r"[A-Za-z0-9._-]{0,255}",
}
"""What a holder writes about itself, and the form of each."""
TICKET = ".wait-"
TURN = r"[0-9]{10}\.[0-9]{6}-[0-9a-f]{8}"
"""When a launch was typed, and its id: the same on every host, so one order holds on all."""

HELD: dict[str, int] = {}
"""Locks that a probe holds, path -> descriptor; the agent of its process goes on with them."""
TICKETS: set[str] = set()
"""The tickets of this program."""

_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK  # another account may have put a link there, or a pipe


def lock_path(name: str) -> str:
    """Return the file that runs on this host lock."""
    return f"/tmp/rackrun-{name}.lock"


# -- holding locks


def lock(
    path: str, shared: bool, run: str = "", name: str = "", seconds: float = LOCK_SECONDS
) -> int:
    """Lock a file and return its descriptor, which holds the lock until this process ends.

    A lock that the probe before us holds stays locked, so that no other launch comes in between.
    Raise OSError when another run holds it for longer, or when it is not a plain file.
    """
    descriptor, deadline = HELD.pop(path, None), time.monotonic() + seconds
    while descriptor is None:
        descriptor = _open_lock(path)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            descriptor = None
            if time.monotonic() >= deadline:
                hint = "type --wait, or --check to see which"
                raise BlockingIOError(f"another run holds this host; {hint}") from None
            time.sleep(0.05)
    if not shared:
        holder = {"user": user_name(os.getuid()), "run": run, "name": name, "since": time.time()}
        with contextlib.suppress(OSError):  # a full disk: locked all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
    return descriptor


def hold(path: str, shared: bool) -> bool:
    """Lock a file until the end of this program; return whether no other process holds it.

    Raise OSError when it is not a plain file.
    """
    try:
        HELD[path] = lock(path, shared, seconds=HOLD_SECONDS)
    except BlockingIOError:
        return False
    return True


def unlock() -> None:
    """Let go of the locks of this program."""
    while HELD:
        os.close(HELD.popitem()[1])


def release() -> None:
    """Let go of the locks of this program, and leave the queue."""
    unlock()
    _remove_tickets(set(TICKETS))


def _open_lock(path: str) -> int:
    """Open a lock file, and make it where there is none; follow no link.

    First without O_CREAT, which the kernel may refuse for another account's file in /tmp
    (fs.protected_regular).
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | _FLAGS)
        except FileNotFoundError:
            mask = os.umask(0)
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)
            except FileExistsError:
                continue
            finally:
                os.umask(mask)
        status = os.fstat(descriptor)
        # A second name may be that of a file which is not ours to write to.
        if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
            return descriptor
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", path)


# -- who holds them


def lock_problem(paths: list[str]) -> str:
    """Return why one of these files, if it is there, cannot be locked; empty if all can be."""
    for path in paths:
        try:
            if os.path.lexists(path):
                os.close(_open_lock(path))
        except OSError as error:
            with contextlib.suppress(OSError):  # it has just been removed
                owner = user_name(os.lstat(path).st_uid)
                return f"{path} of {owner} cannot be locked: {error.strerror}; have it removed"
    return ""


def holder_of(lock: str, parts: list[str], turn: str) -> dict[str, Any]:
    """Return who holds these parts of a host, or else who has waited for it since before `turn`.

    A run on the whole host holds all of its parts; locks of this program block no one. No turn
    comes before all others.
    """
    others = _locks_of_gpus(lock) if "" in parts else [lock + part for part in parts]
    for path in (lock, *others):
        if (holder := holder_in(path)) is not None:
            return _in_words(holder)
    for ahead, part, waiter in tickets(lock) if turn else ():
        # A launch that waits for the whole host waits for all of its parts.
        if ahead < turn and (part in ("", *parts) or "" in parts):
            return {"holder": f"{waiter['user']}, since {_clock(waiter['since'])}", "queued": True}
    return {"holder": ""}


def taken_gpus(lock: str, count: int, turn: str) -> list[int]:
    """Return the GPUs that a launch with this place in the queue cannot have now."""
    return [number for number in range(count) if holder_of(lock, [f".gpu{number}"], turn)["holder"]]


def uses(lock: str, count: int) -> list[dict[str, Any]]:
    """Return who uses the whole host, or which of this number of GPUs, and since when."""
    parts = ["", *(f".gpu{number}" for number in range(count))]
    holders = {part: holder_in(lock + part) for part in parts}
    return [{"part": part, **holder} for part, holder in holders.items() if holder is not None]


def holder_in(path: str) -> dict[str, Any] | None:
    """Return what the holder of a lock has written into it; None if no other program holds it.

    Any account can write there: a text of another shape says nothing, and the user is only named.
    """
    if path in HELD:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError:
        return None  # there is no file, or none that could be locked
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder_written(os.read(descriptor, HOLDER_BYTES))
    finally:
        os.close(descriptor)
    return None


def _holder_written(text: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        fields = json.loads(text)
        if isinstance(fields, dict):
            texts = {name: fields.get(name) for name in HOLDER_TEXTS}
            since = fields.get("since")
            if isinstance(since, float) and 0 <= since < 1e11 and _have_forms(texts):
                return {**texts, "since": since}
    return {**dict.fromkeys(HOLDER_TEXTS, ""), "since": 0.0}


def _have_forms(texts: dict[str, Any]) -> bool:
    return all(
        isinstance(texts[name], str) and re.fullmatch(form, texts[name])
        for name, form in HOLDER_TEXTS.items()
    )


def user_name(uid: int) -> str:
    """Return the name of a user, or the number when it has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _locks_of_gpus(lock: str) -> list[str]:
    folder, name = os.path.split(lock)
    of_gpu = re.compile(re.escape(name) + r"\.gpu[0-9]{1,4}")
    return [os.path.join(folder, file) for file in os.listdir(folder) if of_gpu.fullmatch(file)]


def _in_words(holder: dict[str, Any]) -> dict[str, Any]:
    if not holder["user"]:
        return {"holder": "another launch"}
    who = f"{holder['user']}, since {_clock(holder['since'])}"
    if not holder["run"]:
        return {"holder": who}
    is_ours = holder["user"] == user_name(os.getuid())
    named = f"run {holder['run'][:8]} ({holder['name']}) of {who}"
    return {"holder": named, "run": holder["run"] if is_ours else ""}


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


# -- who waits for them


def take_tickets(lock: str, parts: list[str], turn: str) -> None:
    """Wait for these parts of a host, and for no others: make the tickets, or touch them."""
    current = {f"{lock}{part}{TICKET}{turn}" for part in parts}
    for ticket in current:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(ticket, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o644))
        os.utime(ticket, follow_symlinks=False)
    _remove_tickets(TICKETS - current)
    TICKETS.update(current)


def _remove_tickets(paths: set[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
    TICKETS.difference_update(paths)


def tickets(lock: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return the turn of each living launch that waits, for which part, and whose it is.

    The first one comes first.
    """
    folder, name = os.path.split(lock)
    ticket = re.compile(re.escape(name) + r"(|\.gpu[0-9]{1,4})" + re.escape(TICKET) + f"({TURN})")
    living = []
    for match in filter(None, map(ticket.fullmatch, os.listdir(folder))):
        path, (part, turn) = os.path.join(folder, match[0]), match.groups()
        with contextlib.suppress(OSError):  # it has just gone, or is not ours to remove
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode):
                continue
            if abs(time.time() - status.st_mtime) < DEAD_SECONDS:
                since = float(turn.partition("-")[0])
                living.append((turn, part, {"user": user_name(status.st_uid), "since": since}))
            else:
                os.unlink(path)
    return sorted(living, key=lambda waiter: waiter[:2])
