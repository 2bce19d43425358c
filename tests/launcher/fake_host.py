"""A host whose program prints what a test wants: a real process, and no program of ours."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rackrun.launcher.run.plan import HostPlan
from rackrun.launcher.supervision.agents import drain
from rackrun.launcher.transport.local import LocalChannel, LocalTransport


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
