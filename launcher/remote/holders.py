"""Who holds the locks of a host, and who waits for them, from the kernel and the files."""

from __future__ import annotations

import contextlib
import os
import pwd
import time
from collections.abc import Iterator, Sequence
from typing import Any

from launcher.remote.locks import HELD, TICKET, first_in_line, is_held, signature
from launcher.remote.processes import look_up


def in_the_way(lock: str, parts: list[str], turn: str) -> dict[str, Any]:
    """Return who holds these parts of a host, or else who is before a place in the queue.

    A run on the whole host holds all of its parts; locks of this program block no one.
    """
    if "" in parts:  # the lock of a part has the name of its run
        folder, name = os.path.split(lock)
        files = [file for file in os.listdir(folder) if file.startswith(f"{name}.gpu")]
        gpus = [os.path.join(folder, file) for file in files if TICKET not in file]
        holder = holder_of([lock, *gpus])
    else:
        holder = holder_of([lock + part for part in parts], alone=[lock])
    ticket = "" if holder["holder"] else first_in_line(lock, parts, turn)
    waiting = waiter(ticket) if ticket else None
    if waiting is not None:
        since = time.strftime("%H:%M:%S", time.localtime(waiting["since"]))
        return {"holder": f"{waiting['user']}, since {since}", "queued": True}
    return holder


def taken_gpus(lock: str, count: int, turn: str) -> list[int]:
    """Return the GPUs that a launch with this place in the queue cannot have now."""
    parts = {number: f".gpu{number}" for number in range(count)}
    return [number for number in parts if in_the_way(lock, [parts[number]], turn)["holder"]]


def waiter(ticket: str) -> dict[str, Any] | None:
    """Return who waits with a ticket, and since when; None if it is gone, or none of a launch."""
    with contextlib.suppress(OSError, ValueError, OverflowError):
        since = float(ticket.partition(TICKET)[2].partition("-")[0] or 0)
        time.localtime(since)
        return {"user": user_name(os.stat(ticket).st_uid), "since": since}
    return None


def holder_of(paths: Sequence[str], alone: Sequence[str] = ()) -> dict[str, Any]:
    """Return the holder of a lock on one of these files, and its run where that is this user's.

    Of the files in `alone`, only one counts that no other process shares with the holder.
    """
    holders = [
        _holder(pid, path)
        for pid, path, is_alone in _locked(paths, alone)
        if is_alone or path in paths
    ]
    return max(holders, key=lambda holder: "run" in holder, default={"holder": ""})


def _locked(*groups: Sequence[str]) -> Iterator[tuple[int, str, bool]]:
    with contextlib.suppress(OSError):  # no process holds a file that has just gone
        paths = [path for group in groups for path in group if path not in HELD]
        files = {_inode_of(path): path for path in paths if os.path.lexists(path)}
        if not files:
            return  # collecting all locks costs the kernel some time
        with open("/proc/locks") as file:
            lines = file.readlines()
        for fields in map(str.split, lines):
            if fields[1] == "FLOCK" and fields[5] in files:
                yield int(fields[4]), files[fields[5]], fields[3] == "WRITE"


def uses(lock: str, parts: list[str]) -> Iterator[dict[str, Any]]:
    """Yield who uses which part of a host, since when and for which run."""
    paths = {lock + part: part for part in parts}
    for pid, path, is_alone in _locked(list(paths)):
        if is_alone:  # a lock that is shared says only that the host is not used as a whole
            yield {"part": paths[path], **described(pid, path)}


def waiting(lock: str) -> Iterator[dict[str, Any]]:
    """Yield who waits for this host, or for a part of it, and since when."""
    folder, name = os.path.split(lock)
    for file in os.listdir(folder):
        lock_name, mark, _ = file.partition(TICKET)
        path = os.path.join(folder, file)
        if mark and lock_name.startswith(name) and is_held(path):
            waiting = waiter(path)
            if waiting is not None:
                yield {"part": lock_name[len(name) :][:16], **waiting}


def described(pid: int, path: str) -> dict[str, Any]:
    """Return the owner and age of the process that has a lock, and the run that it has signed."""
    process = look_up(pid)
    facts: dict[str, Any] = {"pid": pid, "user": "", "since": 0.0, "run": "", "name": ""}
    with contextlib.suppress(OSError):
        owner = os.stat(f"/proc/{pid}").st_uid
        run, name = signature(path, owner)
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        since = booted + process.started / os.sysconf("SC_CLK_TCK") if process else 0.0
        facts.update(user=user_name(owner), since=since, run=run, name=name)
        facts["is_ours"] = owner == os.getuid()
    return facts


def _holder(pid: int, path: str) -> dict[str, Any]:
    facts = described(pid, path)
    process = f"process {pid}"
    if facts["user"] and facts["since"]:
        since = time.strftime("%H:%M:%S", time.localtime(facts["since"]))
        process = f"{facts['user']}'s process {pid}, since {since}"
    if not facts["run"]:
        return {"holder": process}
    run = facts["run"] if facts["is_ours"] else ""
    return {"holder": f"run {facts['run'][:8]} ({facts['name']}), {process}", "run": run}


def user_name(uid: int) -> str:
    """Return the name of a user, or the number when it has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _inode_of(path: str) -> str:
    # As the kernel's list of locks names it: fd:01:12345, disk and inode. On Btrfs and overlays,
    # stat has another number for the device; mountinfo has the disk's.
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    try:
        inode = os.fstat(descriptor).st_ino
        with open(f"/proc/self/fdinfo/{descriptor}") as file:
            mount = next((line.split()[1] for line in file if line.startswith("mnt_id:")), "")
    finally:
        os.close(descriptor)
    with open("/proc/self/mountinfo") as file:
        mounts = {fields[0]: fields[2] for fields in map(str.split, file)}
    major, _, minor = mounts.get(mount, "0:0").partition(":")
    return f"{int(major):02x}:{int(minor):02x}:{inode}"
