"""The supervising session of a detached run: an ordinary process on its first host.

    launcher ──▶ run manager ──▶ controller    writes the code, starts it, returns its port
    launcher ──▶ relays ──▶ controller         every other host calls
    launcher ──▶ run manager ──▶ controller    "go": from here on it runs alone

It does what the launcher does for an attached run, with another transport (relays) and another
display (`record`). It needs only the standard library. The key, the variables and the secrets of
the run reach it over standard input and stay in its memory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from launcher.detached.record import RunRecord
from launcher.lifecycle.attempts import Launch, RunObserver, run_to_end
from launcher.lifecycle.launch_settings import LaunchSettings
from launcher.lifecycle.planning import code_here
from launcher.lifecycle.restart_policy import RestartPolicy
from launcher.preflight.facts import Requirements
from launcher.run.container import ContainerSpec
from launcher.run.hosts import Host
from launcher.run.job import JobTemplate, Limits, TaskWork, Work, command_of
from launcher.supervision.signals import STOP_SIGNAL
from launcher.transport.base import Transport
from launcher.transport.local import LocalTransport
from launcher.transport.relay import RelayListener, RelayTransport
from rackrun.contract.task_needs import TaskNeeds
from rackrun.errors import Problem


def main() -> int:
    """Take the order, gather the hosts, and supervise the run until its end."""
    order = json.loads(sys.stdin.readline())
    hosts = tuple(Host(**_values(fields)) for fields in order["hosts"])
    for number in (signal.SIGINT, signal.SIGTERM, STOP_SIGNAL):
        signal.signal(number, _interrupt)
    try:
        listener = RelayListener(order["address"], order["key"])
        _report(port=listener.port)
        names, seconds = [host.label for host in hosts[1:]], order["gather_seconds"]
        others = listener.gather(names, order["words"], seconds)
    except (Problem, OSError) as error:
        _report(error=str(error), code=getattr(error, "exit_code", Problem.exit_code))
        return 1
    _report(ready=True)
    if sys.stdin.readline() != "go\n":
        return 1  # the launcher of the run is gone
    record = RunRecord(Path(order["state"]))
    _report(gone=True)
    _detach_streams()
    return _supervise(record, hosts, (LocalTransport(hosts[0].label), *others), order)


def _supervise(
    record: RunRecord,
    hosts: Sequence[Host],
    transports: Sequence[Transport],
    order: Mapping[str, Any],
) -> int:
    """Run until the end, and record how it ended, whatever the reason."""
    work, settings = work_of(order["work"]), settings_of(order["settings"])
    code, error = Problem.exit_code, f"the controller failed; see {record.state / 'controller.err'}"
    try:
        observer = RunObserver(record.note, record.attempt, order["run"])
        code_files = code_here(settings.jobs.runs, observer.say)
        result = run_to_end(Launch(hosts, transports, work, settings, code_files, observer))
        code, error = result.exit_code, ""
    except Problem as failure:
        code, error = failure.exit_code, str(failure)
    except KeyboardInterrupt:
        code, error = 130, "stopped before anything was started"
    finally:
        for transport in transports:
            if isinstance(transport, RelayTransport):
                transport.close()
        record.end(code, error)
        shutil.rmtree(record.state / "code", ignore_errors=True)
    return code


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Request to stop between two attempts; during one, the supervisor receives it."""
    raise KeyboardInterrupt


def _report(**values: object) -> None:
    """Send a line to the run manager."""
    sys.stdout.write(f"{json.dumps(values)}\n")
    sys.stdout.flush()


def _detach_streams() -> None:
    """Close the streams to the run manager; errors of Python itself still go to controller.err."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    os.close(null)


def order_of(work: Work, settings: LaunchSettings, hosts: Sequence[Host]) -> dict[str, Any]:
    """Return the order for a controller: what it must know of a run, as plain JSON."""
    plain = asdict(settings)
    plain["jobs"]["runs"] = str(settings.jobs.runs)
    return {
        "work": {"task": work.task, "words": work.options}
        if isinstance(work, TaskWork)
        else {"words": work.words},
        "settings": plain,
        "hosts": [vars(host) for host in hosts],
        "name": work.name,
    }


def work_of(fields: Mapping[str, Any]) -> Work:
    """Return the task or command of an order."""
    args = tuple(fields["words"])
    return TaskWork(fields["task"], args) if "task" in fields else command_of(args)


def settings_of(fields: Mapping[str, Any]) -> LaunchSettings:
    """Return the settings that an order holds."""
    jobs, needs = _values(fields["jobs"]), _values(fields["needs"])
    jobs |= {"runs": Path(jobs["runs"]), "limits": Limits(**jobs["limits"])}
    needs["task"] = TaskNeeds(**_values(needs["task"]))
    if needs["image"]:
        needs["image"] = ContainerSpec(**_values(needs["image"]))
    values = _values(fields) | {
        "jobs": JobTemplate(**jobs),
        "needs": Requirements(**needs),
        "restarts": RestartPolicy(**fields["restarts"]),
    }
    return LaunchSettings(**values)


def _values(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a dataclass that has been JSON, with tuples again."""
    return {name: _as_tuples(value) for name, value in fields.items()}


def _as_tuples(value: Any) -> Any:
    """Return lists as tuples, all the way down."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
