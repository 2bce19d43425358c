"""Many hosts: the launcher's open files, and the queue that all their readers share."""

import subprocess
import sys
import time

import pytest

from rackrun.launcher.run.events import Opened
from rackrun.launcher.run.settings import Limits
from rackrun.launcher.run.state import RunState
from rackrun.launcher.supervision.agents import AgentGroup, SilenceDetector, drain
from rackrun.launcher.transport.local import LocalTransport
from tests.lab.waiting import until
from tests.unit.planned import plan_of

ALLOW = """
import resource, sys
from rackrun.launcher.transport.ssh.network import allow_connections
from rackrun.commandline.program import run
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 2000))
def main(args):
    allow_connections(int(args[0]))
    print(resource.getrlimit(resource.RLIMIT_NOFILE))
run(main)
"""


@pytest.mark.parametrize(
    ("hosts", "code", "out", "err"),
    [
        (2, 0, "(1032, 2000)\n", ""),
        (1000, 0, "(2000, 2000)\n", ""),
        (3000, 64, "", "error: 3,000 hosts: need 3064 open files, and 2000 are allowed here; type"),
    ],
)
def test_as_many_files_may_be_open_as_hosts_need(hosts, code, out, err):
    """The soft limit is raised for the connections; where the hard one forbids it, 64 says so."""
    command = [sys.executable, "-c", ALLOW, str(hosts)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, out)
    assert done.stderr.startswith(err) and "Traceback" not in done.stderr


def test_the_lag_of_the_launcher_is_no_silence_of_a_host():
    """Of a turn half a second counts, and nothing while bytes of the host wait to be read."""
    plan = plan_of("a")
    agents = AgentGroup(plan, [LocalTransport("a")])
    run = RunState(plan, begun := time.monotonic())
    silence = SilenceDetector(run, agents, Limits(lease_seconds=15.0))
    begun += 61
    (lost,) = silence.lost(begun, None)
    assert lost.reason == "no agent answered within 60 s"
    run.take(Opened(0, port=1), begun)
    channel = agents.of(0).channel = LocalTransport("a").open(["cat"])

    def lost_after(turns: int, seconds: float) -> str:
        """Return what is said of the host after so many turns of this length."""
        nonlocal begun
        message = ""
        for _ in range(turns):
            begun += seconds
            message = "".join(lost.reason for lost in silence.lost(begun, None))
        return message

    assert lost_after(29, 10.0) == ""  # 290 s by the clock, 14.5 s of listening
    channel.send(b"a heartbeat")
    until(channel.is_unread, "it has come back", 20)
    assert lost_after(300, 0.1) == ""
    channel.receive()
    assert lost_after(1, 0.1) == "silent for 45 s"
    agents.of(0).heard_at += 1
    assert lost_after(150, 0.1) == ""
    assert lost_after(2, 0.1) == "silent for 15 s"
    channel.close()
    drain(channel)
