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
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Literal, TypeAlias

from launcher.errors import HostLost, HostUnreachable, PreflightRefused
from launcher.rendezvous.callers import (
    HELLO_SECONDS,
    NodeInfo,
    NodeName,
    PendingCallers,
    RunName,
    Slots,
    plain_address,
)
from launcher.rendezvous.connection import PeerConnection
from launcher.run.hosts import MOST_HOSTS
from launcher.run.job import RUN_ID
from rackrun.contract.variables import JOB_KEY
from rackrun.errors import Problem, UsageError
from rackrun.light_dataclass import dataclass
from rackrun.run_folder import RUN_NAME
from rackrun.shapes import AtMost, Matches, Misshapen, shaped
from rackrun.terminal import one_line
from rackrun.units import first_few, form

Say = Callable[[str], None]
"""Shows the user which nodes are still waited for."""

Agree: TypeAlias = "Callable[[Sequence[NodeInfo], str], Agreement]"
"""Decides for all nodes, from what each reported and the address at which it reached node 0."""

NEWS_SECONDS = 10.0  # between two words about who is missing
TRY_SECONDS = 0.5
AGREEMENT_BYTES = 1 << 24


@dataclass(frozen=True)
class Agreement:
    """Values on which all nodes agree."""

    run_id: Annotated[str, Matches(RUN_ID)]
    folder: Annotated[str, Matches(RUN_NAME)]
    """The name of the run folder."""
    names: Annotated[tuple[NodeName, ...], AtMost(MOST_HOSTS)]
    slots: Annotated[tuple[Slots, ...], AtMost(MOST_HOSTS)]
    resume: RunName = ""
    """The name of the run to resume; empty to begin."""
    data: Annotated[str, Matches("[!-~]{0,1024}")] = ""
    """The URL of the shards that node 0 serves; empty when it serves none."""


@dataclass(frozen=True)
class RendezvousOutcome:
    """Last message of node 0: the agreement, or why there is no run."""

    agreed: Agreement | None = None
    refused: Annotated[str, AtMost(1 << 16)] = ""
    code: Literal[64, 65, 69, 70, 74, 75, 77, 78] = 69


@dataclass(frozen=True)
class Rendezvous:
    """The connections of a node once all have arrived."""

    agreement: Agreement
    address: str
    """Our own address towards the others."""
    master: str
    """That of node 0, as we reach it."""
    connections: dict[int, PeerConnection]
    """To node 0; or from there to every other node."""


def gather(
    this_node: NodeInfo,
    port: int,
    wait_seconds: float,
    agree: Agree,
    say: Say,
    key: bytes = b"",
) -> Rendezvous:
    """Wait for all others as node 0, agree, and send them the agreement."""
    members = {0: this_node}
    connections: dict[int, PeerConnection] = {}
    with _listening(port) as listener, PendingCallers(listener, key) as strangers:
        try:
            for connection, member in _callers(strangers, this_node, members, wait_seconds, say):
                _admit(connection, member, members, connections)
            address = plain_address(next(iter(connections.values())).stream.getsockname()[0])
            agreement = agree([members[node] for node in range(this_node.nodes)], address)
        except Problem as error:
            for connection in connections.values():
                connection.send(refused=str(error), code=error.exit_code)
                connection.close()
            raise
    for connection in connections.values():
        connection.send(agreed=asdict(agreement))
    return Rendezvous(agreement, address, address, connections)


@contextlib.contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    """Return a socket on the master's port, on all addresses, as torchrun's own will be."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        listener = socket.create_server(
            ("", port), family=family, dualstack_ipv6=both, backlog=1024
        )
    except OSError as error:
        taken = f"port {port} of this node: {error.strerror}"
        raise PreflightRefused(f"{taken}; type: --port N, the same on every node") from error
    with listener:
        yield listener


def _callers(
    strangers: PendingCallers,
    this_node: NodeInfo,
    members: dict[int, NodeInfo],
    wait_seconds: float,
    say: Say,
) -> Iterator[tuple[PeerConnection, NodeInfo]]:
    """Yield callers until all nodes are there; raise HostUnreachable when one is missing."""
    deadline = time.monotonic() + wait_seconds
    news_at = time.monotonic() + NEWS_SECONDS
    while len(members) < this_node.nodes:
        now = time.monotonic()
        missing = sorted(set(range(this_node.nodes)) - members.keys())
        if now > deadline:
            late = f"{_nodes_text(missing)} did not come within {wait_seconds:g} s"
            raise HostUnreachable(late + strangers.hint)
        if now > news_at:
            news_at = now + NEWS_SECONDS
            waiting = f"waiting for {_nodes_text(missing)}{strangers.hint}"
            say(f"{len(members)} of {this_node.nodes} nodes are here; {waiting}")
        yield from strangers.introduced(min(news_at, deadline) - now + 0.01)


def _admit(
    connection: PeerConnection,
    member: NodeInfo,
    members: dict[int, NodeInfo],
    connections: dict[int, PeerConnection],
) -> None:
    """Note a node; a wrong one ends the meeting for all, because no other would take its place."""
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
    """Return True while a node that has greeted still waits."""
    connection.stream.setblocking(False)
    try:
        return bool(connection.stream.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def join(
    this_node: NodeInfo, master: str, port: int, wait_seconds: float, say: Say, key: bytes = b""
) -> Rendezvous:
    """Wait for the agreement of node 0, as any other node, and return it."""
    deadline = time.monotonic() + wait_seconds
    stream = _connect(master, port, deadline, wait_seconds, say)
    connection = PeerConnection(stream, key, AGREEMENT_BYTES)
    where = f"{master}:{port}"
    with contextlib.ExitStack() as failing:
        failing.callback(connection.close)
        try:
            agreement = _outcome_of(connection, this_node, deadline, where)
        except TimeoutError:
            silent = f"{where} did not say within {wait_seconds:g} s that all nodes are there"
            raise HostUnreachable(silent) from None
        except Misshapen as error:
            nonsense = f"{where} sent what no node of this job would: {error}"
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
    fields = None
    if connection.call(max(HELLO_SECONDS, deadline - time.monotonic())):
        connection.send(hello=asdict(this_node), nonce=connection.nonce)
        fields = connection.receive(max(HELLO_SECONDS, deadline - time.monotonic()))
    if fields is None:
        hint = f"; is {JOB_KEY} the same there?" if connection.key else ""
        raise HostLost(f"node 0 ({where}) ended before all nodes were there{hint}")
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
    """Return a connection to node 0, as soon as its name resolves and it answers."""
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
    """Return the first few of some nodes, in words."""
    return f"{form(len(nodes), 'node')} {first_few([*map(str, nodes)], 5)}"
