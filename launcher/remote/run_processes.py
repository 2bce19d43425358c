"""What this account runs on a host: the processes of a run, and its agents."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rackrun.contract import variables
from rackrun.launcher.remote.files import SCRATCH, contents, is_own_folder
from rackrun.launcher.remote.processes import (
    all_pids,
    command_line,
    environment_of,
    is_mine,
    look_up,
)

JSON_BYTES = 1 << 24
MOST_LISTED = 200  # agents in one list


def list_agents() -> dict[str, Any]:
    """Return this account's agents here, with what their ranks run."""
    agents, by_identity = [], agents_of("")
    for pid in our_pids() if by_identity else ():
        agent = by_identity.get(_identity_of(pid))
        if agent:
            job = _read_json(os.path.join(agent["scratch"], "command.json"))
            is_whole = isinstance(job, dict)
            agents.append(
                {
                    "run": os.path.basename(agent["scratch"]).split("-")[1],
                    "folder": str(job.get("folder", "")) if is_whole else "",
                    "command": job.get("command", []) if is_whole else [],
                    "seconds": described(pid).get("seconds", 0.0),
                }
            )
    return {"agents": agents[:MOST_LISTED]}


def _read_json(path: str) -> Any:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return json.loads(contents(path, JSON_BYTES))
    return {}


def processes(run: str) -> dict[str, Any]:
    """Return the processes of a run on this host; of agents, when the launcher last called.

    Only those of this account: any other account of this host can set any variable, take any
    name, and make any folder in /tmp that is not there yet.
    """
    mark, agents, facts = f"{variables.RUN_ID}={run}".encode(), agents_of(run), []
    for pid in our_pids():
        environment = environment_of(pid)
        if agent := agents.get(_identity_of(pid)):
            facts.append({"role": "agent", **described(pid), **agent})
        elif any(variable.startswith(mark) for variable in environment):
            facts.append({**_role_of(pid, environment), **described(pid)})
    alive = [process for process in facts if "pid" in process]
    return {"processes": alive, "python": sys.executable}


def agents_of(run: str) -> dict[Any, dict[str, Any]]:
    """Return the agents of a run by their identities, as their private folders have them."""
    by_identity: dict[Any, dict[str, Any]] = {}
    for scratch in filter(is_own_folder, glob.glob(f"{SCRATCH}{run}*")):
        path = os.path.join(scratch, "agent.pid")
        identity = _read_json(path)
        if isinstance(identity, list) and len(identity) == 5:
            pid, started, _, _, space = identity
            command = _read_json(os.path.join(scratch, "command.json"))
            lease = command.get("lease_seconds") if isinstance(command, dict) else None
            with contextlib.suppress(OSError, TypeError):  # gone just now; no keys for a table
                by_identity[pid, started, space] = {
                    "scratch": scratch,
                    "heard_seconds_ago": round(max(0.0, time.time() - os.path.getmtime(path)), 1),
                    "lease_seconds": lease if isinstance(lease, (int, float)) else 0.0,
                }
    return by_identity


def our_pids() -> Iterator[int]:
    """Yield the processes that this account started; a setuid program runs as another one."""
    return filter(is_mine, sorted(all_pids()))


def _role_of(pid: int, environment: list[bytes]) -> dict[str, Any]:
    command, values = command_line(pid), dict(v.partition(b"=")[::2] for v in environment)
    scratch = os.path.dirname(values.get(variables.REPORTS.encode(), b"").decode(errors="replace"))
    rank = values.get(b"RANK", b"").decode(errors="replace")
    if not rank.isdigit():
        role = "torchrun" if "--node-rank=" in command else "other"
        return {"role": role, "scratch": scratch}
    role = "shim" if f"{scratch}/agent.zip" in command else "rank"
    return {"role": role, "rank": int(rank), "scratch": scratch}


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


def described(pid: int) -> dict[str, Any]:
    """Return process id, state, and the seconds since it was started; nothing when it is gone."""
    process = look_up(pid)
    if process is None:
        return {}
    started = process.started / os.sysconf("SC_CLK_TCK")
    seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    return {"pid": pid, "state": process.state, "seconds": round(max(0.0, seconds), 1)}


ORDERS: dict[str, Callable[..., dict[str, Any]]] = {"list": list_agents, "processes": processes}
