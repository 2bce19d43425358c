"""A launcher with any number of hosts on this machine, for tests that inject faults.

As a program it takes its arguments as one JSON object; `Drive` starts it and looks after it.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rackrun.launcher.lifecycle.session import run
from rackrun.launcher.output.screen import shown_here
from rackrun.launcher.run.job import START_SECONDS, Command, Job
from rackrun.launcher.run.plan import PlannedHost, make_plan
from rackrun.launcher.run.settings import Limits, Options
from rackrun.launcher.supervision import agents as supervised
from rackrun.launcher.supervision import supervisor
from rackrun.launcher.transport.local import LocalChannel, LocalTransport
from rackrun.run_folder import RunFolder
from tests.lab import warm
from tests.lab.hosts import FAKE, processes_with
from tests.lab.run import Terminal
from tests.lab.waiting import until
from tests.lab.warm import ROOT

HERE = ROOT / "tests" / "lab"
SHORT = {"lease_seconds": 3.0, "hang_seconds": 1.0, "checkpoint_seconds": 5.0}
TIMEOUT_SECONDS = 240.0


def main(
    command: list[str],
    folder: str,
    slots: list[int] | None = None,
    real: bool = False,
    python: str = sys.executable,
    environment: list[tuple[str, str]] | None = None,
    limits: dict[str, float] | None = None,
    plain: bool = True,
    workdir: str = "",
    agents: list[str] | None = None,
    on_event: list[str] | None = None,
    start_seconds: float = START_SECONDS,
) -> int:
    Path(folder).mkdir()
    supervisor.GRACE_SECONDS = 1.0
    supervised.START_SECONDS = start_seconds
    job = Job(
        Command(tuple(command)),
        RunFolder(Path(folder)),
        Options(
            env=tuple(f"{name}={value}" for name, value in environment or ()),
            limits=Limits(**{**SHORT, **(limits or {})}),
            on_event=shlex.join(on_event or ()),
        ),
    )
    slots = slots or [1]
    addresses = [f"127.0.0.{2 + host}" for host in range(len(slots))]
    facts = [
        PlannedHost(*(address, address, count, python, workdir or folder, folder, 2, "lo"))
        for address, count in zip(addresses, slots, strict=True)
    ]
    plan = make_plan(job, facts, port_of_no_connection())
    if not real:
        cheap = [
            dataclasses.replace(
                host,
                torchrun=(*FAKE, *host.torchrun[3:]),
                environment=(*host.environment, ("FIRST_RANK", str(host.first_rank))),
            )
            for host in plan.hosts
        ]
        plan = dataclasses.replace(plan, hosts=tuple(cheap))
    pairs = zip(addresses, agents or ["python3"] * len(slots), strict=True)
    transports = [HostOf(name, program) for name, program in pairs]
    code = run(job, plan, transports, shown_here(plain)).exit_code
    (Path(folder) / "peak").write_text(str(peak_mib(os.getpid())))
    (Path(folder) / "processor").write_text(str(time.process_time()))
    return code


class HostOf(LocalTransport):
    """A host whose system's Python is this program."""

    def __init__(self, name: str, program: str) -> None:
        super().__init__(name)
        self.program = program

    def open(self, argv: Sequence[str]) -> LocalChannel:
        return super().open((self.program, *argv[1:]))


def port_of_no_connection() -> int:
    """Return a free port that no connection of another test is given before torchrun takes it.

    Where that happens, a launch tries again with another port; here its cause would be the port.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", first // 2 + secrets.randbelow(first // 2)))
            return int(probe.getsockname()[1])


def peak_mib(pid: int) -> float:
    """Return the peak memory of a process; rusage would include its parent's at the fork."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


STARTED: list["Drive"] = []


def end_all() -> None:
    """End what a failed test has left running."""
    while STARTED:
        drive = STARTED.pop()
        for pid in (*drive.alive(), *processes_with(drive.canary)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        drive.process.wait()
        for stream in (drive.process.stdout, drive.process.stderr):
            if stream is not None:
                stream.close()


class Drive:
    """A launcher in a process of its own, and every process that descends from it."""

    def __init__(
        self,
        folder: Path,
        command: Iterable[str],
        terminal: Terminal | None = None,
        output: Path | None = None,
        before: Iterable[str] = (),
        **options: Any,
    ) -> None:
        self.folder = folder / f"run-{time.time_ns()}"
        self.canary = f"RUN_CANARY={uuid.uuid4()}"
        keywords = {"command": list(command), "folder": str(self.folder), **options}
        name, _, value = self.canary.partition("=")
        launcher = ["-m", "tests.launcher.drive", json.dumps(keywords)]
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL}
        streams |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        if output is not None:
            streams["stdout"] = output.open("wb")
        if terminal is not None:
            streams = terminal.streams
        streams |= {"cwd": ROOT, "text": True, "errors": "replace"}
        streams["env"] = {**os.environ, "TERM": "xterm-256color", name: value}
        self.process = (
            subprocess.Popen([*before, sys.executable, *launcher], **streams)
            if before
            else warm.Launcher(*launcher, **streams)
        )
        if output is not None:
            streams["stdout"].close()
        STARTED.append(self)
        self.out = self.err = ""
        self.code: int | None = None

    def wait(self) -> int:
        """Wait for the launcher's end; return its exit code."""
        self.out, self.err = self.process.communicate(timeout=TIMEOUT_SECONDS)
        return int(self.process.returncode)

    def end(self) -> "Drive":
        """Wait, and be asked about."""
        self.wait()
        return self

    @property
    def result(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "result.json").read_text()))

    @property
    def peak_mib(self) -> float:
        """Return the peak memory of the launcher."""
        return float((self.folder / "peak").read_text())

    @property
    def processor_seconds(self) -> float:
        """Return the CPU seconds of the launcher itself."""
        return float((self.folder / "processor").read_text())

    @property
    def plan(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "plan.json").read_text()))

    def log(self, rank: int, stream: str, host: int = 0) -> Path:
        return self.folder / "logs" / f"127.0.0.{2 + host}" / "1" / f"rank-{rank}.{stream}"

    def alive(self) -> dict[int, str]:
        """Return process ids and command lines of the launcher's descendants."""
        processes = processes_with(self.canary)
        processes.pop(self.process.pid, None)
        return processes

    def pid(self, part: str) -> int:
        """Wait for a process of that kind; return its id."""
        return int(until(lambda: [pid for pid, line in self.alive().items() if part in line])[0])


def break_down(number: int, frame: object) -> None:
    """Raise an error of ours wherever the launcher is just now."""
    raise ZeroDivisionError


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, break_down)
    sys.exit(main(**json.loads(sys.argv[1])))
