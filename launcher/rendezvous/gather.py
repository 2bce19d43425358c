"""Before a run that a scheduler started node by node: all nodes meet at node 0, and agree.

    node k ── who I am, how many ranks I start ──▶ node 0, on the master's port
           ◀── who is still missing; at last what all agreed on, or why there is no run ──

So every node knows the world size, the run's name and folder, and which checkpoint to resume,
before torchrun takes the port over. The connections stay open: `peers` reports over them how nodes
end. They carry no secret and nothing that would be executed, and nothing that a node sends is used
before it has the shape declared here: any program that reaches the port may send anything.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import msgspec

from rackrun.errors import Problem, UsageError
from rackrun.launcher.errors import HostLost, HostUnreachable, PreflightRefused
from rackrun.launcher.rendezvous.connection import PeerConnection
from rackrun.launcher.run.hosts import MOST_HOSTS, MOST_SLOTS
from rackrun.launcher.run.job import RUN_ID
from rackrun.run_folder import RUN_NAME
from rackrun.shapes import Misshapen, Shape, at_most, between, matches, shaped
from rackrun.terminal import one_line
from rackrun.units import first_few, form

Say = Callable[[str], None]
"""Shows the user which nodes are still waited for."""

Agree: TypeAlias = "Callable[[Sequence[NodeInfo], str], Agreement]"
"""Decides for all nodes, from what each reported and the address at which it reached node 0."""

NEWS_SECONDS = 10.0  # between two lines on the nodes that are missing
TRY_SECONDS = 0.5
AGREEMENT_BYTES = 1 << 24
HELLO_SECONDS = 5.0  # for the whole hello, which any client may send byte by byte
REST_SECONDS = 0.1
MOST_WORDS = 4096  # of a command

Slots = Annotated[int, between(1, MOST_SLOTS)]
NodeName = Annotated[str, matches("[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")]
RunName = Annotated[str, matches(f"({RUN_NAME})?")]
Digest = Annotated[str, matches("[0-9a-f]{16}")]
Version = Annotated[str, matches("[!-~]{0,64}")]


class NodeWork(Shape, frozen=True):
    """What a node would run: digests, so that no argument and no value travels."""

    command: Annotated[tuple[Digest, ...], at_most(MOST_WORDS)] = ()
    """A digest of each argument."""
    name: NodeName = "run"
    environment: Digest = "0" * 16
    code: Annotated[str, matches("([0-9a-f]{16})?")] = ""
    """Empty where git does not know the folder."""
    python: Version = ""
    torch: Version = ""


class NodeInfo(Shape, frozen=True):
    """A node's description of itself."""

    node: Annotated[int, between(0, MOST_HOSTS)]
    nodes: Annotated[int, between(1, MOST_HOSTS)]
    processes: Slots
    name: NodeName
    job: Annotated[str, matches("[!-~]{0,255}")]
    """The scheduler's name for the job: two jobs may meet at one port by mistake."""
    resume: RunName = ""
    """The newest run here that has a checkpoint to resume."""
    work: NodeWork = NodeWork()


class NodeHello(Shape, frozen=True):
    """The first message of a node."""

    hello: NodeInfo


class Agreement(Shape, frozen=True):
    """Values on which all nodes agree."""

    run_id: Annotated[str, matches(RUN_ID)]
    folder: Annotated[str, matches(RUN_NAME)]
    """The name of the run folder."""
    names: Annotated[tuple[NodeName, ...], at_most(MOST_HOSTS)]
    slots: Annotated[tuple[Slots, ...], at_most(MOST_HOSTS)]
    resume: RunName = ""
    """The name of the run to resume; empty to begin."""
    data: Annotated[str, matches("[!-~]{0,1024}")] = ""
    """The URL of the shards that node 0 serves; empty when it serves none."""


class RendezvousOutcome(Shape, frozen=True):
    """Last message of node 0: the agreement, or why there is no run."""

    agreed: Agreement | None = None
    refused: Annotated[str, at_most(1 << 16)] = ""
    code: Literal[64, 65, 69, 70, 74, 75, 77, 78] = 69


Callers: TypeAlias = "queue.SimpleQueue[tuple[PeerConnection, NodeInfo]]"


@dataclass(frozen=True)
class Rendezvous:
    """The connections of a node once all have arrived."""

    agreement: Agreement
    address: str
    """Our own address towards the others."""
    master: str
    """That of node 0, as we reach it."""
    connections: dict[int, PeerConnection]
    """The connection to node 0; or on node 0, those to every other node."""


def gather(
    this_node: NodeInfo,
    port: int,
    wait_seconds: float,
    agree: Agree,
    say: Say,
) -> Rendezvous:
    """Wait for all others as node 0, agree, and send them the agreement."""
    members = {0: this_node}
    connections: dict[int, PeerConnection] = {}
    with _callers(port) as callers:
        try:
            for connection, member in _in_time(callers, this_node, members, wait_seconds, say):
                _admit(connection, member, members, connections)
            address = plain_address(next(iter(connections.values())).stream.getsockname()[0])
            agreement = agree([members[node] for node in range(this_node.nodes)], address)
        except Problem as error:
            for connection in connections.values():
                connection.send(refused=str(error), code=error.exit_code)
                connection.close()
            raise
    for connection in connections.values():
        connection.send(agreed=msgspec.to_builtins(agreement))
    return Rendezvous(agreement, address, address, connections)


@contextlib.contextmanager
def _callers(port: int) -> Iterator[Callers]:
    """Yield a queue of those who call at a port and say who they are."""
    # On all addresses, as torchrun's own socket will be.
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        listener = socket.create_server(
            ("", port), family=family, dualstack_ipv6=both, backlog=1024
        )
    except OSError as error:
        taken = f"port {port} of this node: {error.strerror}"
        raise PreflightRefused(f"{taken}; type: --port N, the same on every node") from error
    callers: Callers = queue.SimpleQueue()
    thread = threading.Thread(target=_accept_all, args=(listener, callers), daemon=True)
    with listener:
        thread.start()
        try:
            yield callers
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            thread.join()


def _accept_all(listener: socket.socket, callers: Callers) -> None:
    """Hear every caller on a thread of its own, until the listener is shut down."""
    while True:
        try:
            stream, _ = listener.accept()
        except OSError as error:
            if error.errno == errno.EINVAL:
                return
            time.sleep(REST_SECONDS)  # no descriptor is free, until the silent ones have had theirs
        else:
            threading.Thread(target=_hear, args=(stream, callers), daemon=True).start()


def _hear(stream: socket.socket, callers: Callers) -> None:
    """Queue a caller that says who it is; hang up on any other."""
    connection = PeerConnection(stream)
    try:
        hello: NodeHello = shaped(connection.receive(HELLO_SECONDS), NodeHello)
    except (Misshapen, TimeoutError):
        connection.close()
    else:
        callers.put((connection, hello.hello))


def _in_time(
    callers: Callers,
    this_node: NodeInfo,
    members: dict[int, NodeInfo],
    wait_seconds: float,
    say: Say,
) -> Iterator[tuple[PeerConnection, NodeInfo]]:
    """Yield callers until all nodes have come; raise HostUnreachable if one is late."""
    deadline = time.monotonic() + wait_seconds
    news_at = time.monotonic() + NEWS_SECONDS
    while len(members) < this_node.nodes:
        now = time.monotonic()
        missing = sorted(set(range(this_node.nodes)) - members.keys())
        if now > deadline:
            late = f"{_nodes_text(missing)} did not come within {wait_seconds:g} s"
            raise HostUnreachable(late)
        if now > news_at:
            news_at = now + NEWS_SECONDS
            waiting = f"waiting for {_nodes_text(missing)}"
            say(f"{len(members)} of {this_node.nodes} nodes are here; {waiting}")
        with contextlib.suppress(queue.Empty):
            yield callers.get(timeout=max(0.0, min(news_at, deadline) - now) + 0.01)


def _admit(
    connection: PeerConnection,
    member: NodeInfo,
    members: dict[int, NodeInfo],
    connections: dict[int, PeerConnection],
) -> None:
    """Add a node; a wrong one ends the meeting for all, because no other would take its place."""
    first = members[0]
    if member.job != first.job:
        stranger = f"{member.name} belongs to job {member.job}, this is {first.job}"
        connection.send(refused=f"{stranger}; type: --port N", code=UsageError.exit_code)
        connection.close()
        return
    before = members.get(member.node)
    if before and (member.node == 0 or _is_open(connections[member.node])):
        connection.send(refused="this node rank is taken", code=UsageError.exit_code)
        twice = f"{before.name} and {member.name} both say that they are node {member.node}"
        raise UsageError(f"{twice}; node is started once per node")
    if not 0 < member.node < first.nodes == member.nodes:
        message = f"{member.name} is node {member.node} of {member.nodes}"
        connection.send(refused=f"node 0 is one of {first.nodes}", code=UsageError.exit_code)
        raise UsageError(f"{message}, but node 0 is one of {first.nodes}")
    members[member.node], connections[member.node] = member, connection


def _is_open(connection: PeerConnection) -> bool:
    # Still waiting, or closed meanwhile: a node that was started again may take its own place.
    connection.stream.setblocking(False)
    try:
        return bool(connection.stream.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def join(this_node: NodeInfo, master: str, port: int, wait_seconds: float, say: Say) -> Rendezvous:
    """Wait, as any node but node 0, for its agreement, and return it."""
    deadline = time.monotonic() + wait_seconds
    stream = _connect(master, port, deadline, wait_seconds, say)
    connection = PeerConnection(stream, AGREEMENT_BYTES)
    where = f"{master}:{port}"
    with contextlib.ExitStack() as failing:
        failing.callback(connection.close)
        try:
            agreement = _outcome_of(connection, this_node, deadline, where)
        except TimeoutError:
            silent = f"{where} did not say within {wait_seconds:g} s that all nodes are there"
            raise HostUnreachable(silent) from None
        except Misshapen as error:
            nonsense = f"{where} sent a message that no node of this job sends: {error}"
            raise HostUnreachable(nonsense) from None
        failing.pop_all()
    return Rendezvous(
        agreement,
        address=plain_address(stream.getsockname()[0]),
        master=plain_address(stream.getpeername()[0]),
        connections={0: connection},
    )


def _outcome_of(
    connection: PeerConnection, this_node: NodeInfo, deadline: float, where: str
) -> Agreement:
    """Send node 0 who we are, and return what was agreed; Misshapen for what cannot have been."""
    connection.send(hello=msgspec.to_builtins(this_node))
    fields = connection.receive(max(HELLO_SECONDS, deadline - time.monotonic()))
    if fields is None:
        raise HostLost(f"node 0 ({where}) ended before all nodes were there")
    outcome: RendezvousOutcome = shaped(fields, RendezvousOutcome)
    if outcome.agreed is None:
        if not outcome.refused:
            raise Misshapen("neither what was agreed nor why not")
        error = HostUnreachable(f"node 0: {one_line(outcome.refused)}")
        error.exit_code = outcome.code
        raise error
    slots = outcome.agreed.slots
    if (
        not len(outcome.agreed.names) == len(slots) == this_node.nodes
        or slots[this_node.node] != this_node.processes
    ):
        raise Misshapen(f"not the {this_node.nodes} nodes of this run")
    return outcome.agreed


def _connect(
    master: str, port: int, deadline: float, wait_seconds: float, say: Say
) -> socket.socket:
    news_at = time.monotonic() + NEWS_SECONDS
    while True:
        try:
            left = max(TRY_SECONDS, min(NEWS_SECONDS, deadline - time.monotonic()))
            return socket.create_connection((master, port), left)
        except OSError as error:
            resolves = not isinstance(error, socket.gaierror)
            trouble = f"does not answer ({error})" if resolves else "does not resolve"
        if time.monotonic() > deadline:
            hint = "is node 0 running?" if resolves else "type: --master ADDRESS"
            late = f"{master}:{port} {trouble}, for {wait_seconds:g} s"
            raise HostUnreachable(f"node 0: {late}; {hint}")
        if time.monotonic() > news_at:
            news_at = time.monotonic() + NEWS_SECONDS
            say(f"waiting for node 0: {master}:{port} {trouble}")
        time.sleep(TRY_SECONDS)


def _nodes_text(nodes: Sequence[int]) -> str:
    return f"{form(len(nodes), 'node')} {first_few([*map(str, nodes)], 5)}"


def plain_address(address: str) -> str:
    """Return an IPv4 address that came over an IPv6 socket as IPv4."""
    return address.removeprefix("::ffff:")
