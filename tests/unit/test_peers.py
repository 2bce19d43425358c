"""What launchers of other nodes say during a run, and what is made of nonsense."""

import queue
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from rackrun.launcher.rendezvous.connection import PeerConnection
from rackrun.launcher.rendezvous.gather import Agreement, Rendezvous
from rackrun.launcher.run.events import PeerFailed, PeerHangLimit, PeerStops
from rackrun.launcher.run.state import RunState
from rackrun.launcher.supervision.agents import EventQueue
from rackrun.launcher.supervision.hangs import PHASE_HANG_FACTORS
from rackrun.launcher.supervision.outcome import final_cause, stopping_line
from rackrun.launcher.supervision.peers import LAUNCHER_GONE, NONSENSE, Peers
from rackrun.launcher.supervision.root_cause import FailureLog
from rackrun.units import MOST_SECONDS
from tests.unit.planned import plan_of

NAMES = ("n0", "n1", "n2")


def line() -> tuple[PeerConnection, socket.socket]:
    """Return a connection of ours, and its other end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        return PeerConnection(listener.accept()[0]), theirs


class Node:
    """Our peers, at node 0 or at node 2, and the ends of the lines to them."""

    def __init__(self, node: int, stack: ExitStack) -> None:
        agreement = Agreement("0" * 32, "20260101-120000-toy", NAMES, (1, 1, 1))
        others = (1, 2) if node == 0 else (0,)
        lines = {other: line() for other in others}
        connections = {other: ours for other, (ours, _) in lines.items()}
        self.ends = {other: theirs for other, (_, theirs) in lines.items()}
        for theirs in self.ends.values():
            stack.enter_context(theirs)
            theirs.settimeout(20)
        self.inbox: EventQueue = queue.Queue()
        self.peers = stack.enter_context(Peers(node, Rendezvous(agreement, "", "", connections)))
        self.peers.listen(self.inbox)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_what_other_nodes_say_becomes_events_and_node_0_passes_it_on(stack):
    """With the name of the node that it is about."""
    node = Node(0, stack)
    failed = b'{"failed": {"node": 1, "text": "x", "exit_code": 3, "secondary": false}}\n'
    node.ends[1].sendall(failed + b'{"hang_limit": {"node": 1, "seconds": 5}}\n')
    node.ends[1].sendall(b'{"stop": {"node": 1, "signal": 15}}\n')
    assert node.inbox.get(timeout=20) == PeerFailed(1, "x", 3, False, "n1")
    assert node.inbox.get(timeout=20) == PeerHangLimit(1, 5.0)
    assert node.inbox.get(timeout=20) == PeerStops(1, 15)
    heard = b""
    while heard.count(b"\n") < 3:
        heard += node.ends[2].recv(1 << 16)
    assert heard.startswith(failed)


def test_the_longest_hang_limit_is_one_for_the_other_nodes(stack):
    """--hang-seconds of a century switches the detection off, and a phase multiplies it."""
    longest = MOST_SECONDS * max(PHASE_HANG_FACTORS.values())
    node, other = Node(0, stack), Node(2, stack)
    other.peers.send_hang_limit(longest)
    node.ends[2].sendall(other.ends[0].recv(1 << 16))
    assert node.inbox.get(timeout=20) == PeerHangLimit(2, longest)


@pytest.mark.parametrize(
    "args",
    [
        b"5\n",
        b"[[[\n",
        b"\xff\n",
        b"x" * 100_000,
        b'{"failed": 5}\n',
        b'{"failed": {}}\n',
        b'{"failed": {"node": 9, "text": "x", "exit_code": 3, "secondary": false}}\n',
        b'{"failed": {"node": "1", "text": "x", "exit_code": 3, "secondary": false}}\n',
        b'{"failed": {"node": 1, "text": "x", "exit_code": 0, "secondary": false}}\n',
        b'{"failed": {"node": 2, "text": "x", "exit_code": 3, "secondary": false}}\n',
        b'{"stop": {"node": 1, "signal": 10000}}\n',
        b'{"stop": {"node": 1, "signal": "KILL"}}\n',
        b'{"hang_limit": {"node": 1, "seconds": NaN}}\n',
        b'{"hang_limit": {"node": 1, "seconds": 1e300}}\n',
        b'{"hang_limit": {"node": 1, "seconds": -1}}\n',
        b'{"other": 1}\n',
    ],
)
def test_nonsense_is_the_end_of_that_node_and_of_no_thread(stack, args):
    """Types, ranges, another node's name: node 1 is lost (75), and the others are notified."""
    node = Node(0, stack)
    node.ends[1].sendall(args)
    assert node.inbox.get(timeout=20) == PeerFailed(1, NONSENSE, 75, False, "n1")
    assert b"not the protocol of peers" in node.ends[2].recv(1 << 16)


def test_node_0_speaks_for_all_but_not_for_us(stack):
    """As it passes on what others say; and its own end is one."""
    node = Node(2, stack)
    args: dict[str, Any] = {"node": 1, "signal": 15}
    node.ends[0].sendall(f'{{"stop": {args}}}\n'.replace("'", '"').encode())
    assert node.inbox.get(timeout=20) == PeerStops(1, 15)
    node.ends[0].sendall(b'{"stop": {"node": 2, "signal": 15}}\n')
    assert node.inbox.get(timeout=20) == PeerFailed(0, NONSENSE, 75, False, "n0")
    other = Node(2, stack)
    other.ends[0].close()
    assert other.inbox.get(timeout=20) == PeerFailed(0, LAUNCHER_GONE, 75, False, "n0")


@pytest.mark.parametrize(("number", "name"), [(40, "signal 40"), (15, "SIGTERM")])
def test_another_node_may_have_been_stopped_by_any_signal(number, name):
    """Real-time signals have no name in Python: the number is shown, and no launcher fails."""
    assert stopping_line(number) == f"stopping: {name}"
    run = RunState(plan_of("a"), 0.0)
    cause = final_cause(run, FailureLog(run, lambda *source: ""), number)
    assert (cause.text, cause.exit_code) == (f"stopped by {name}", 128 + number)
