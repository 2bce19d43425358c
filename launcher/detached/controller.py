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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from rackrun.errors import Problem
from rackrun.launcher.detached.record import RunRecord
from rackrun.launcher.detached.replies import RUN
from rackrun.launcher.lifecycle.attempts import Launch, RunObserver
from rackrun.launcher.lifecycle.launch_spec import LaunchSettings, LaunchSpec
from rackrun.launcher.lifecycle.planning import code_here
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.run.job import Command, TaskWork, command_of
from rackrun.launcher.supervision.signals import STOP_SIGNAL
from rackrun.launcher.transport.base import Transport
from rackrun.launcher.transport.local import LocalTransport
from rackrun.launcher.transport.relay import RelayListener, RelayTransport
from rackrun.shapes import Matches, parsed

ORDER_BYTES = 64 << 20


@dataclass(frozen=True)
class RunOrder:
    """All that a controller must know of its run; it travels as JSON."""

    run: Annotated[str, Matches(RUN)]
    work: TaskWork | Command
    settings: LaunchSettings
    hosts: tuple[Host, ...]
    address: str
    """Of the first host, where the relays of the others call."""
    key: str
    """Of the run, as PEM: controller and relays authenticate with it."""
    tokens: tuple[str, ...]
    """One for each of the other hosts, which its relay sends."""
    gather_seconds: float
    state: str = ""
    """The controller's folder, which the run manager on the host adds."""

    @property
    def plain(self) -> dict[str, Any]:
        """Return the order as values of JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self), default=os.fspath))
        return plain


def main() -> int:
    """Take the order, gather the hosts, and supervise the run until its end."""
    order = parsed(sys.stdin.readline(), RunOrder, ORDER_BYTES)
    for number in (signal.SIGINT, signal.SIGTERM, STOP_SIGNAL):
        signal.signal(number, _interrupt)
    try:
        listener = RelayListener(order.address, order.key)
        _report(port=listener.port)
        names = [host.label for host in order.hosts[1:]]
        others = listener.gather(names, order.tokens, order.gather_seconds)
    except (Problem, OSError) as error:
        _report(error=str(error), code=getattr(error, "exit_code", Problem.exit_code))
        return 1
    _report(ready=True)
    if sys.stdin.readline() != "go\n":
        return 1  # the launcher of the run is gone
    # As soon as there is a record, the run manager counts this as a run that has begun.
    record = RunRecord(Path(order.state))
    _report(begun=True)
    # The run manager, at the other end of these pipes, will end; standard error stays a file.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    os.close(null)
    return _supervise(record, (LocalTransport(order.hosts[0].label), *others), order)


def _supervise(record: RunRecord, transports: Sequence[Transport], order: RunOrder) -> int:
    jobs, work = order.settings.jobs, order.work
    if isinstance(work, Command):
        work = command_of(work.args)  # a function's command is one of its own kind
    code, error = Problem.exit_code, f"the controller failed; see {record.state / 'controller.err'}"
    try:
        observer = RunObserver(record.note, record.attempt, order.run)
        code_files = code_here(jobs.runs, observer.say)
        spec = LaunchSpec(order.hosts, transports, work, order.settings, code_files)
        result = Launch(spec, observer).run()
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
    raise KeyboardInterrupt  # between two attempts; during one, the supervisor handles signals


def _report(**values: object) -> None:
    sys.stdout.write(f"{json.dumps(values)}\n")
    sys.stdout.flush()
