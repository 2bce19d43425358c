"""The supervising session of a detached run: an ordinary process on its first host.

    launcher ──▶ desk ──▶ keeper    puts down the code, starts it, says where it listens
    launcher ──▶ outposts ──▶ keeper    every other host calls
    launcher ──▶ desk ──▶ keeper    "go": from here on nobody else is needed

It does what the launcher does for an attached run, with other places (`gate`) and another screen
(`record`). It needs only the standard library, and the key, the variables and the secrets of the
run reach it over standard input and stay in its memory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

from launcher.detached.known_runs import frozen, host_of
from launcher.detached.record import RunRecord
from launcher.lifecycle.attempts import RunObserver, launch_there
from launcher.run.hosts import Host
from launcher.run.job import Command, Limits, TaskWork, Work
from launcher.run.settings import HostOptions
from launcher.supervision.signals import STOP_SIGNAL
from launcher.transport.base import Transport
from launcher.transport.local import LocalTransport
from launcher.transport.relay import Gate, Outpost
from rackrun.errors import Problem


def main() -> int:
    """Take the order, gather the hosts, and keep the run until its end."""
    order = json.loads(sys.stdin.readline())
    os.environ.update(order["variables"])
    hosts = tuple(host_of(told) for told in order["hosts"])
    for number in (signal.SIGINT, signal.SIGTERM, STOP_SIGNAL):
        signal.signal(number, interrupted)
    try:
        gate = Gate(order["address"], order["key"])
        say(port=gate.port)
        names, seconds = [host.label for host in hosts[1:]], order["gather_seconds"]
        others = gate.gather(names, order["words"], seconds)
    except (Problem, OSError) as error:
        say(error=str(error), code=getattr(error, "exit_code", Problem.exit_code))
        return 1
    say(ready=True)
    if sys.stdin.readline() != "go\n":
        return 1  # whoever wanted the run is gone
    record = RunRecord(Path(order["state"]))
    say(gone=True)
    let_go()
    return keep(record, hosts, (LocalTransport(hosts[0].label), *others), order)


def keep(
    record: RunRecord, hosts: Sequence[Host], places: Sequence[Transport], order: Mapping[str, Any]
) -> int:
    """Run until the end, and write down how it ended, whatever that was."""
    work, options = work_of(order["work"]), options_of(order["options"])
    code, error = Problem.exit_code, f"the keeper failed; see {record.state / 'keeper.err'}"
    try:
        audience = RunObserver(record.note, record.attempt, order["run"])
        result = launch_there(hosts, places, work, options, audience)
        code, error = result.exit_code, ""
    except Problem as failure:
        code, error = failure.exit_code, str(failure)
    except KeyboardInterrupt:
        code, error = 130, "stopped before anything was started"
    finally:
        for place in places:
            if isinstance(place, Outpost):
                place.close()
        record.end(code, error)
        shutil.rmtree(record.state / "code", ignore_errors=True)
    return code


def interrupted(number: int, frame: FrameType | None) -> None:
    """Somebody wants the end while nothing runs; while something does, the supervisor hears it."""
    raise KeyboardInterrupt


def say(**words: object) -> None:
    """A line for the desk."""
    sys.stdout.write(f"{json.dumps(words)}\n")
    sys.stdout.flush()


def let_go() -> None:
    """Leave the streams of the desk; what Python itself has to say goes on to keeper.err."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    os.close(null)


def order_of(work: Work, options: HostOptions, hosts: Sequence[Host]) -> dict[str, Any]:
    """What a keeper has to know of a run, as JSON has it."""
    kept = {name: value for name, value in vars(options).items() if name in KEPT}
    return {
        "work": {"task": work.name, "words": work.options}
        if isinstance(work, TaskWork)
        else {"words": work.words},
        "options": {**kept, "runs": str(options.runs), "limits": vars(options.limits)},
        "hosts": [vars(host) for host in hosts],
        "name": work.name,
    }


KEPT = {field.name for field in fields(HostOptions)} - {"runs", "limits", "serving"}
"""The options that a keeper is given as they are; it has nothing to do with serving."""


def work_of(told: Mapping[str, Any]) -> Work:
    """What is to run, from an order."""
    words = tuple(told["words"])
    return TaskWork(told["task"], words) if "task" in told else Command(words)


def options_of(told: Mapping[str, Any]) -> HostOptions:
    """The options, from an order."""
    values: dict[str, Any] = {name: frozen(value) for name, value in told.items()}
    values["runs"], values["limits"] = Path(told["runs"]), Limits(**told["limits"])
    return HostOptions(**values)
