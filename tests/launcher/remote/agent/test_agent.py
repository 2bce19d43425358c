"""The agent alone: what it reads, what it refuses, when it gives up."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from rackrun.launcher.remote import locks
from rackrun.launcher.run.events import (
    Event,
    Opened,
    Output,
    RankEnded,
    Report,
)
from rackrun.launcher.run.plan import HostPlan
from rackrun.launcher.supervision import agent_protocol
from rackrun.launcher.transport.local import LocalChannel
from tests.lab.hosts import peak_mib
from tests.lab.waiting import until
from tests.launcher.conftest import agent_plan, started_agent


def test_output_without_a_reader_waits_in_the_ranks_pipe(tmp_path):
    """While the launcher does not read, the agent's memory stays small; later all of it arrives.

    Of reports it then gets the newest of every rank, however many there were.
    """
    code = (
        "import json, os, socket, subprocess\n"
        "ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "ear.connect(os.environ['RACKRUN_REPORTS'])\n"
        "flood = subprocess.Popen(['head', '-c', '50000000', '/dev/zero'])\n"
        "for step in range(50_000):\n"
        "    ear.send(json.dumps({'rank': 0, 'step': step, 'why': 'x' * 1000}).encode())\n"
        "open('told', 'w').close()\n"
        "flood.wait()\n"
    )
    plan = agent_plan(tmp_path, sys.executable, "-c", code)
    channel = started_agent(plan)
    while not (tmp_path / "told").exists():
        time.sleep(0.3)
        channel.send(agent_protocol.BEAT)
    agent_pid, *_ = json.loads(Path(plan.scratch, "agent.pid").read_text())
    assert peak_mib(agent_pid) < 40
    decoder, arrived, step = agent_protocol.Decoder(plan), 0, 0
    while data := channel.receive():
        for event in decoder.feed(data):
            arrived += len(event.data) if isinstance(event, Output) else 0
            step = event.fields["step"] if isinstance(event, Report) else step
            if isinstance(event, RankEnded):
                channel.send(agent_protocol.stop_order(9, 0))
    assert arrived == 50_000_000
    assert step == 49_999


def locked(tmp_path: Path, *command: str) -> tuple[HostPlan, Path]:
    """Return a plan whose agent locks a file."""
    path = tmp_path / "lock"
    return HostPlan(
        **{**vars(agent_plan(tmp_path, *command)), "locks": ((str(path), False),)}
    ), path


def wait_for(channel: LocalChannel, decoder: agent_protocol.Decoder, kind: type[Event]) -> None:
    """Read until there was such an event."""
    while not any(isinstance(event, kind) for event in decoder.feed(channel.receive())):
        pass


def is_free(path: Path) -> bool:
    """Return whether no process holds a lock."""
    return locks.holder_in(str(path)) is None


def test_a_lock_stays_young_and_goes_with_its_run(tmp_path):
    """PROC-4: a cleaner of /tmp does not find it old; it names the run; kill -9 sets it free."""
    plan, path = locked(tmp_path, "sleep", "98764")
    channel = started_agent(plan)
    wait_for(channel, agent_protocol.Decoder(plan), Opened)
    os.utime(path, (0, 0))
    until(lambda: path.stat().st_mtime > 0)
    holder = locks.holder_in(str(path))
    assert (holder["run"], holder["name"]) == (plan.scratch.split("-")[1], Path(plan.folder).name)
    agent_pid, *_ = json.loads(Path(plan.scratch, "agent.pid").read_text())
    os.kill(agent_pid, signal.SIGKILL)
    until(lambda: is_free(path) and not Path(plan.scratch).exists())
    channel.close()
    while channel.receive():
        pass
