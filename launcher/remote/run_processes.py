"""The processes of a run that this account has on a host, and how they are known.

An agent has written its identity into its folder; torchrun and ranks have the path of that folder
in their environment. Only processes of this account count: any other account of this host can set
any variable, take any name, and make any folder in /tmp that is not there yet.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from rackrun.contract import variables
from rackrun.launcher.remote.files import SCRATCH, contents, is_own_folder
from rackrun.launcher.remote.processes import (
    Process,
    all_pids,
    descendants,
    environment_of,
    is_mine,
    look_up,
)

IDENTITY_FILE = "agent.pid"
IDENTITY_BYTES = 1 << 12  # more than any agent writes about itself


def processes(run: str) -> dict[str, Any]:
    """Return the processes of a run on this host, each with the private folder of its agent.

    `run` is the id of the run, or the beginning of it.
    """
    folder_of = _folder_of_each(f"{SCRATCH}{run}")
    listed = [{"pid": pid, "scratch": folder} for pid, folder in folder_of.items()]
    return {"processes": listed, "python": sys.executable}


def processes_below(scratch: str) -> list[Process]:
    """Return the agent that has this folder, what runs for it, and all their descendants."""
    known = [pid for pid, folder in _folder_of_each(scratch).items() if folder == scratch]
    processes = filter(None, (*map(look_up, known), *descendants(*known)))
    return list({process.pid: process for process in processes}.values())


def _folder_of_each(prefix: str) -> dict[int, str]:
    """Return process id -> folder of its agent, of those whose folder's path begins like this."""
    agents, mark = agents_of(prefix), f"{variables.REPORTS}={prefix}".encode()
    folder_of = {}
    for pid in sorted(all_pids()):
        if pid == os.getpid() or not is_mine(pid):  # a setuid program runs as another account
            continue
        marks = [variable for variable in environment_of(pid) if variable.startswith(mark)]
        folder = agents.get(identity(pid))
        if folder is None and marks:
            folder = os.path.dirname(marks[0].partition(b"=")[2].decode(errors="replace"))
        if folder is not None and look_up(pid):
            folder_of[pid] = folder
    return folder_of


def agents_of(prefix: str) -> dict[Any, str]:
    """Return the agents whose folders have such a path, by the identity that they have written."""
    folders = {}
    for scratch in filter(is_own_folder, glob.glob(f"{glob.escape(prefix)}*")):
        # the file may be damaged in any way
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            path = os.path.join(scratch, IDENTITY_FILE)
            pid, started, namespace = json.loads(contents(path, IDENTITY_BYTES))
            folders[pid, started, namespace] = scratch
    return folders


def identity(pid: int) -> tuple[int, int, str] | None:
    """Return what no other process has: id and start time, and the namespace that the id is of."""
    process = look_up(pid)
    try:
        with open(f"/proc/{pid}/status") as file:
            ids = [line.split() for line in file if line.startswith("NSpid:")]
        namespace = os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None
    # In a container a process has another id than here: the last one is what it knows.
    return (int(ids[0][-1]) if ids else pid, process.started, namespace) if process else None


ORDERS: dict[str, Callable[..., dict[str, Any]]] = {"processes": processes}
