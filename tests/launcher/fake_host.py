"""A host whose program prints what a test wants: a real process, and no program of ours."""

import select
import sys
from collections.abc import Sequence
from pathlib import Path

from rackrun.launcher.run.plan import HostPlan
from rackrun.launcher.supervision.agents import drain
from rackrun.launcher.transport.local import LocalChannel, LocalTransport

SAYS = """\
import select, sys
says, rest = bytes.fromhex(sys.argv[1]), float(sys.argv[2])
sys.stdout.buffer.write(says[:-1])
sys.stdout.buffer.flush()
if rest:  # it rests once it has its program, which alone may fill the socket
    sys.stdin.buffer.read(int(sys.stdin.buffer.readline().split()[0]))
poll = select.poll()
poll.register(0, select.POLLHUP)  # takes nothing, and goes when the other side has gone
poll.poll(rest * 1000)
sys.stdout.buffer.write(says[-1:])
sys.stdout.buffer.flush()
sys.stdin.buffer.read()
"""


class TrackedTransport(LocalTransport):
    """A transport to this machine; started programs can be waited for."""

    def __init__(self, name: str = "here") -> None:
        super().__init__(name)
        self.channels: list[LocalChannel] = []

    def open(self, argv: Sequence[str]) -> LocalChannel:
        self.channels.append(super().open(argv))
        return self.channels[-1]

    def wait_for_end(self) -> None:
        """Wait until its programs have ended."""
        for channel in self.channels:
            channel.close()
            drain(channel)


class FakeHost(TrackedTransport):
    """A transport whose programs only print; the last byte may come late."""

    def __init__(self, says: bytes, rest_seconds: float = 0.0) -> None:
        super().__init__("fake")
        self.says = says
        self.rest_seconds = rest_seconds

    def open(self, argv: Sequence[str]) -> LocalChannel:
        args = (sys.executable, "-S", "-c", SAYS, self.says.hex(), str(self.rest_seconds))
        channel = super().open(args)
        if self.says[:-1]:  # how long Python takes to start on busy cores is no part of a test
            select.select([channel.stream], [], [], 60)
        return channel


def replies(*message: bytes) -> bytes:
    """Return answers with their lengths before them."""
    return b"".join(b"%d\n%s" % (len(one), one) for one in message)


def host_plan(folder: Path) -> HostPlan:
    start = {"torchrun": (), "command": (), "environment": (), "defaults": ()}
    return HostPlan(
        *("fake", "127.0.0.1", 1, sys.executable, str(folder), str(folder)),
        **start,
        node=0,
        first_rank=0,
        scratch="",
        agent_python=sys.executable,
    )
