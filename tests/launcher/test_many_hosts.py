"""Many hosts: the launcher's open files, and the queue that all their readers share."""

import queue
import subprocess
import sys
import threading

import pytest

from launcher.run.events import Joined
from launcher.supervision.agent_client import EventQueue

ALLOW = """
import resource, sys
from launcher.transport.open_files import allow_connections
from rackrun.commandline import run
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
def test_as_many_files_may_be_open_as_hosts_need(hosts: int, code: int, out: str, err: str) -> None:
    """The soft limit is raised for the connections; where the hard one forbids it, 64 says so."""
    command = [sys.executable, "-c", ALLOW, str(hosts)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, out)
    assert done.stderr.startswith(err) and "Traceback" not in done.stderr


def test_all_events_are_taken_at_once_and_in_order() -> None:
    """A full queue holds up its writer until all of it is taken; nothing is lost or swapped."""
    events = EventQueue(4)
    writer = threading.Thread(target=lambda: [events.put(Joined(node)) for node in range(100)])
    writer.start()
    taken: list[object] = []
    while len(taken) < 100:
        some = events.get_all(60)
        assert len(some) <= 5  # what fits, and one that came as the first was taken
        taken += some
    writer.join()
    assert taken == [Joined(node) for node in range(100)]
    with pytest.raises(queue.Empty):
        events.get_all(0)
