"""The processes of a run that this account has on a host."""

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
    all_pids,
    environment_of,
    is_mine,
    look_up,
)

MOST_BYTES = 1 << 12  # of the file by which an agent is known


def processes(run: str) -> dict[str, Any]:
    """Return the processes of a run on this host, each with the private folder of its agent.

    Only those of this account: any other account of this host can set any variable, take any
    name, and make any folder in /tmp that is not there yet.
    """
    mark, agents, found = f"{variables.RUN_ID}={run}".encode(), agents_of(run), []
    for pid in filter(is_mine, sorted(all_pids())):  # a setuid program runs as another account
        environment = environment_of(pid)
        scratch = agents.get(_identity_of(pid))
        if scratch is None and any(variable.startswith(mark) for variable in environment):
            values = dict(variable.partition(b"=")[::2] for variable in environment)
            reports = values.get(variables.REPORTS.encode(), b"")
            scratch = os.path.dirname(reports.decode(errors="replace"))
        if scratch is not None and look_up(pid):
            found.append({"pid": pid, "scratch": scratch})
    return {"processes": found, "python": sys.executable}


def agents_of(run: str) -> dict[Any, str]:
    """Return the private folders of a run's agents by identity, as the agents have written it."""
    by_identity = {}
    for scratch in filter(is_own_folder, glob.glob(f"{SCRATCH}{run}*")):
        # it may be damaged in any way
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            pid, started, _, _, space = json.loads(
                contents(os.path.join(scratch, "agent.pid"), MOST_BYTES)
            )
            by_identity[pid, started, space] = scratch
    return by_identity


def _identity_of(pid: int) -> tuple[int, int, str] | None:
    # What an agent writes about itself: its id, its start time, its namespace of ids.
    process = look_up(pid)
    try:
        with open(f"/proc/{pid}/status") as file:
            ids = [line.split() for line in file if line.startswith("NSpid:")]
        space = os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None
    # In a container a process has another id than here: the last one is what it knows.
    return (int(ids[0][-1]) if ids else pid, process.started, space) if process else None


ORDERS: dict[str, Callable[..., dict[str, Any]]] = {"processes": processes}
