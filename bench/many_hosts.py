"""Measure what a launcher costs by number of hosts, and what breaks first.

    python -m bench.many_hosts [HOSTS...]

The launcher's side is real: plan, a thread per host, heartbeats, supervision, logs, plain lines.
The hosts are sockets to one other process, which sends what the agents of hosts with eight ranks
would: that these have started, the use of the host every second, from when all hosts have begun
also a report of each rank, and the end 20 s later. Logins and checks of the hosts are left out:
`python -m bench.launch` has those.
"""

import contextlib
import json
import os
import resource
import selectors
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rackrun.commandline.options import Positional
from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from rackrun.launcher.lifecycle.session import Session
from rackrun.launcher.output.console import PlainOutput
from rackrun.launcher.remote.agent import frames
from rackrun.launcher.remote.service import MARKER
from rackrun.launcher.run.events import Event, RankStarted
from rackrun.launcher.run.job import Command, Job
from rackrun.launcher.run.plan import Plan, PlannedHost, make_plan
from rackrun.launcher.transport.local import SocketChannel
from rackrun.launcher.transport.ssh.network import allow_connections
from rackrun.run_folder import RunFolder

RANKS = 8
STOP = b'"do": "stop"'
REPORTS = 20
REPORT = {"phase": "train", "epoch": 1, "epochs": 1, "steps": 100, "epoch_steps": 100}
USAGE = {"event": "usage", "cpu": 0.5, "memory": 1 << 30, "memory_total": 1 << 33}


class SocketHost:
    """A host that is the other end of a socket."""

    def __init__(self, name: str, stream: socket.socket) -> None:
        self.name = name
        self.stream = stream

    def open(self, argv: Sequence[str]) -> SocketChannel:
        """Return the channel; nothing is started."""
        return SocketChannel(self.stream)


@dataclass(frozen=True)
class Settings:
    """What a launcher costs by number of hosts."""

    hosts: Positional[tuple[int, ...]] = ()
    """How many: each of these numbers; without any, 64, 250 and 1000."""


def main(args: list[str]) -> None:
    """Print a line for each number of hosts, each from a process of its own."""
    settings = parse(Settings, "python -m bench.many_hosts", args)
    print(
        "hosts  all started (s)  CPU for that (s)  then of a core  threads  files  peak MB",
        flush=True,
    )
    for count in settings.hosts or (64, 250, 1000):
        child = os.fork()
        if not child:
            measure(count)
        assert os.waitpid(child, 0)[1] == 0, f"the run on {count} hosts failed"


def measure(count: int) -> NoReturn:
    """Run a job on that many hosts, print the line, and end this process."""
    allow_connections(2 * count)
    pairs = [socket.socketpair() for _ in range(count)]
    if not os.fork():
        for ours, _ in pairs:
            ours.close()
        serve([theirs for _, theirs in pairs])
        os._exit(0)
    for _, theirs in pairs:
        theirs.close()
    with tempfile.TemporaryDirectory() as folder, quiet() as stdout:
        (job_folder := Path(folder, "run")).mkdir()
        code, line = launched([ours for ours, _ in pairs], job_folder)
        os.write(stdout, line.encode())
    os._exit(code)


def launched(streams: Sequence[socket.socket], folder: Path) -> tuple[int, str]:
    """Launch on the hosts at the other ends; return the exit code and the line of the table."""
    began, before = time.monotonic(), time.process_time()
    facts = [
        PlannedHost(
            f"gpu{n:04d}", f"10.0.{n >> 8}.{n & 255}", RANKS, "/usr/bin/python3", "/", str(folder)
        )
        for n in range(len(streams))
    ]
    job = Job(Command(("true",)), RunFolder(folder))
    plan = make_plan(job, facts, 29500)
    socket_hosts = [
        SocketHost(host.name, stream) for host, stream in zip(facts, streams, strict=True)
    ]
    screen = Screen(plan)
    with Session(job, plan, socket_hosts, screen) as session:
        code = session.supervise().exit_code
    ended, after = time.monotonic(), time.process_time()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    share = (after - screen.processor_seconds) / (ended - screen.started_at)
    return code, (
        f"{len(streams):5}  {screen.started_at - began:15.1f}"
        f"  {screen.processor_seconds - before:16.1f}  {share:14.2f}  {screen.threads:7}"
        f"  {screen.files:5}  {memory:7.0f}\n"
    )


class Screen(PlainOutput):
    """Plain lines; notes when the last rank has started, and what is open then."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.left = plan.world_size
        self.started_at = self.processor_seconds = 0.0
        self.threads = self.files = 0

    def show(self, event: Event) -> None:
        """Count the ranks that have started."""
        super().show(event)
        if isinstance(event, RankStarted):
            self.left -= 1
            if not self.left:
                self.started_at, self.processor_seconds = time.monotonic(), time.process_time()
                self.threads = threading.active_count()
                self.files = len(list(Path("/proc/self/fd").iterdir()))


def serve(streams: Sequence[socket.socket]) -> None:
    """Serve as the agents of all hosts, until the launcher has ended the run on each."""
    selector = selectors.DefaultSelector()
    for stream in streams:
        selector.register(stream, selectors.EVENT_READ, stream)
    begun: set[socket.socket] = set()
    seconds, due = 0, 0.0
    while selector.get_map():
        for key, _ in selector.select(0.1):
            stream = key.data
            order = stream.recv(1 << 18)
            if order and stream not in begun:
                begun.add(stream)
                stream.sendall(first_words())
            if not order or STOP in order:
                selector.unregister(stream)
                stream.sendall(event(event="closed", survivors=[]))
                stream.close()
        if time.monotonic() > due:
            seconds, due = seconds + (len(begun) == len(streams)), time.monotonic() + 1
            for key in list(selector.get_map().values()):
                if key.data in begun:
                    key.data.sendall(a_second(seconds))


def first_words() -> bytes:
    """Return what an agent sends until its ranks have started."""
    started = (event(local, event="started", pid=1000 + local) for local in range(RANKS))
    return MARKER + event(event="opened", port=1) + event(event="joined") + b"".join(started)


def a_second(seconds: int) -> bytes:
    """Return the use of a host and, once all have begun, reports or the ends of its ranks."""
    if not 0 < seconds <= REPORTS + 1:
        return event(**USAGE)
    if seconds > REPORTS:
        ends = (event(local, event="ended", code=0) for local in range(RANKS))
        return b"".join(ends) + event(event="torchrun-ended", code=0)
    report = {**REPORT, "step": seconds, "epoch_step": seconds, "images_per_second": 100.0}
    payload = json.dumps(report).encode()
    reports = (frame(frames.REPORT, local, payload) for local in range(RANKS))
    return b"".join(reports) + event(**USAGE)


def event(local: int = frames.NO_RANK, **fields: object) -> bytes:
    """Return the frame of an event."""
    return frame(frames.EVENT, local, json.dumps(fields).encode())


def frame(kind: int, local: int, payload: bytes) -> bytes:
    """Return a frame as agents send it."""
    return frames.HEADER.pack(kind, local, len(payload)) + payload


@contextlib.contextmanager
def quiet() -> Iterator[int]:
    """Send standard output to nowhere; give a descriptor of what it was."""
    stdout = os.dup(1)
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 1)
        yield stdout


if __name__ == "__main__":
    run(main)
