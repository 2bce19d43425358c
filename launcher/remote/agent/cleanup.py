"""Clean up after a run whose agent could not: find, end and remove what is left."""

from __future__ import annotations

import os
import time

from launcher.remote.files import identities_in, is_own_folder, is_scratch, remove_folder
from launcher.remote.processes import (
    KILL_SECONDS,
    all_processes,
    descendants,
    environment_of,
    is_mine,
    kill,
)
from rackrun.contract import variables

TYPE_CHECKING = False  # programs for hosts start sooner without typing
if TYPE_CHECKING:
    from launcher.remote.processes import Process


def sweep(scratch: str) -> list[str]:
    """End what is left of a run; return the names of what could not be ended.

    Ranks and torchrun have the path of the agent's folder in their environment; the folder has the
    process ids of the agent and its guard. What runs in a container ends with it. The path may come
    from a process of another account, so any other path is left alone.
    """
    if not is_scratch(scratch):
        return []
    in_container = is_own_folder(scratch) and os.path.exists(f"{scratch}/container")
    kept = _remove_container(os.path.basename(scratch)) if in_container else []
    deadline = time.monotonic() + KILL_SECONDS
    agent, guard = identities_in(scratch)
    left = remains(scratch, agent, guard)
    while left and time.monotonic() < deadline:
        for process in left:
            # The guard last: orphans of what was just killed become its children, and are found.
            if len(left) == 1 or [process.pid, process.started] != guard:
                kill(process)
        time.sleep(0.02)
        left = remains(scratch, agent, guard)
    remove_folder(scratch)
    return [*kept, *(f"{process.pid} ({process.name})" for process in left)]


def _remove_container(name: str) -> list[str]:
    """End a container with all that runs in it; return its name when it could not be ended."""
    import subprocess  # costs half as much as the start of Python

    try:
        done = subprocess.run(
            ["docker", "rm", "--force", name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=KILL_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return [f"container {name}"]
    is_removed = done.returncode == 0 or b"No such container" in done.stderr
    return [] if is_removed else [f"container {name}"]


def remains(scratch: str, *identities: list[int]) -> list[Process]:
    """Return the processes of a run: those known or marked, and all their descendants.

    A mark counts only on processes of this account: any account may set any variable.
    """
    mark = f"{variables.REPORTS}={scratch}/reports".encode()
    marked = [
        process
        for process in all_processes()
        if process.pid != os.getpid()
        and ([process.pid, process.started] in identities or mark in environment_of(process.pid))
        and is_mine(process.pid)
    ]
    below = descendants(*(process.pid for process in marked))
    return list({process.pid: process for process in (*marked, *below)}.values())
