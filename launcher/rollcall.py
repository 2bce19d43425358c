"""Before a run that a scheduler started node by node: all nodes meet at node 0, and agree.

    node k ── who I am, how many ranks I start ──▶ node 0, on the master's port
           ◀── who is still missing; at last what all agreed on, or why there is no run ──

So every node knows the size of the world, the run's name and folder, and from where to go on,
before torchrun takes the port over. The connections stay open: `peers` tells over them how nodes
end. They carry no secret and nothing that would be executed.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from launcher.errors import (
    HostLost,
    HostUnreachable,
    LauncherError,
    PreflightRefused,
    UsageError,
)
from launcher.outpost import watch_over

Say = Callable[[str], None]
"""Tells the user how far the waiting is."""

Agree: TypeAlias = "Callable[[Sequence[Member], str], Agreement]"
"""Decides for all, from what all said and the address by which they reach node 0."""

HELLO_SECONDS = 5.0  # from a connection to its first words; strangers may say nothing
NEWS_SECONDS = 10.0  # between two words about who is missing
TRY_SECONDS = 0.5
LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Member:
    """What a node says about itself."""

    node: int
    nodes: int
    processes: int
    name: str
    job: str
    """The scheduler's name for the job: two jobs may meet at one port by mistake."""
    resume: str = ""
    """The newest run here that has a checkpoint to go on from."""


@dataclass(frozen=True)
class Agreement:
    """What all nodes have in common."""

    run_id: str
    folder: str
    """The name of the run folder."""
    names: tuple[str, ...]
    slots: tuple[int, ...]
    resume: str = ""
    """The name of the run to go on from; empty to begin."""
    data: str = ""
    """The URL of the shards that node 0 serves; empty when it serves none."""


@dataclass(frozen=True)
class Meeting:
    """All nodes are here."""

    agreement: Agreement
    address: str
    """Our own address towards the others."""
    master: str
    """That of node 0, as we reach it."""
    connections: dict[int, Connection]
    """To node 0; or from there to every other node."""


class Connection:
    """JSON objects, a line each, in both directions."""

    def __init__(self, stream: socket.socket) -> None:
        """Notices by itself when the other machine is gone."""
        self.stream = stream
        self.rest = b""
        watch_over(stream)

    def send(self, **words: Any) -> None:
        """Send one object; a connection that is gone is noticed by whoever receives."""
        with contextlib.suppress(OSError):
            self.stream.sendall(json.dumps(words).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """The next object; None at the end, TimeoutError when nothing comes in time."""
        self.stream.settimeout(seconds)
        while b"\n" not in self.rest and len(self.rest) < LINE_BYTES:
            try:
                data = self.stream.recv(1 << 16)
            except TimeoutError:
                if seconds is not None:
                    raise
                data = b""  # the other machine is silent
            except OSError:
                data = b""
            if not data:
                return None
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\n")
        try:
            words = json.loads(line)
        except ValueError:
            return None
        return words if isinstance(words, dict) else None

    def close(self) -> None:
        """End both directions; wakes whoever receives."""
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)
        self.stream.close()


def gather(
    own: Member,
    port: int,
    wait_seconds: float,
    agree: Agree,
    say: Say,
) -> Meeting:
    """On node 0: wait for all others, agree, and tell them."""
    members = {0: own}
    connections: dict[int, Connection] = {}
    with listening(port) as listener:
        try:
            for connection, member in callers(listener, own, members, wait_seconds, say):
                take(connection, member, members, connections)
            address = plain(next(iter(connections.values())).stream.getsockname()[0])
            agreement = agree([members[node] for node in range(own.nodes)], address)
        except LauncherError as error:
            for connection in connections.values():
                connection.send(refused=str(error), code=error.exit_code)
                connection.close()
            raise
    for connection in connections.values():
        connection.send(agreed=asdict(agreement))
    return Meeting(agreement, address, address, connections)


@contextlib.contextmanager
def listening(port: int) -> Iterator[socket.socket]:
    """A socket on the master's port, on all addresses, as torchrun's own will be."""
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


def callers(
    listener: socket.socket,
    own: Member,
    members: dict[int, Member],
    wait_seconds: float,
    say: Say,
) -> Iterator[tuple[Connection, Member]]:
    """Whoever calls, until all nodes are there; raises HostUnreachable when one does not come."""
    deadline = time.monotonic() + wait_seconds
    news_at = time.monotonic() + NEWS_SECONDS
    while len(members) < own.nodes:
        now = time.monotonic()
        missing = sorted(set(range(own.nodes)) - members.keys())
        if now > deadline:
            raise HostUnreachable(f"{nodes_text(missing)} did not come within {wait_seconds:g} s")
        if now > news_at:
            news_at = now + NEWS_SECONDS
            say(f"{len(members)} of {own.nodes} nodes are here; waiting for {nodes_text(missing)}")
        listener.settimeout(min(news_at, deadline) - now + 0.01)
        with contextlib.suppress(TimeoutError):
            stream, _ = listener.accept()
            caller = hello(Connection(stream))
            if caller:
                yield caller


def hello(connection: Connection) -> tuple[Connection, Member] | None:
    """What a caller says of itself; None for one that is no node of ours."""
    try:
        words = connection.receive(HELLO_SECONDS)
        return connection, Member(**(words or {})["hello"])
    except (TimeoutError, KeyError, TypeError):
        connection.close()
        return None


def take(
    connection: Connection,
    member: Member,
    members: dict[int, Member],
    connections: dict[int, Connection],
) -> None:
    """Note a node; a wrong one ends the meeting for all, because no other would take its place."""
    own = members[0]
    if member.job != own.job:
        stranger = f"{member.name} belongs to job {member.job}, this is {own.job}"
        connection.send(refused=f"{stranger}; type: --port N", code=UsageError.exit_code)
        connection.close()
        return
    before = members.get(member.node)
    if before and (member.node == 0 or is_open(connections[member.node])):
        connection.send(refused="this node rank is taken", code=UsageError.exit_code)
        twice = f"{before.name} and {member.name} both say that they are node {member.node}"
        raise UsageError(f"{twice}; node is started once per node")
    if not 0 < member.node < own.nodes == member.nodes:
        said = f"{member.name} is node {member.node} of {member.nodes}"
        connection.send(refused=f"node 0 is one of {own.nodes}", code=UsageError.exit_code)
        raise UsageError(f"{said}, but node 0 is one of {own.nodes}")
    members[member.node], connections[member.node] = member, connection


def is_open(connection: Connection) -> bool:
    """Whether a node that said hello still waits: it says nothing more, unless it ends."""
    connection.stream.setblocking(False)
    try:
        return bool(connection.stream.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def join(own: Member, master: str, port: int, wait_seconds: float, say: Say) -> Meeting:
    """On any other node: wait until node 0 answers, and for what it says."""
    deadline = time.monotonic() + wait_seconds
    connection = reach(master, port, deadline, wait_seconds, say)
    connection.send(hello=asdict(own))
    try:
        words = connection.receive(max(HELLO_SECONDS, deadline - time.monotonic()))
    except TimeoutError:
        silent = f"{master}:{port} did not say within {wait_seconds:g} s that all nodes are there"
        raise HostUnreachable(silent) from None
    if words is None:
        raise HostLost(f"node 0 ({master}:{port}) ended before all nodes were there")
    if "refused" in words:
        error = HostUnreachable(f"node 0: {words['refused']}")
        error.exit_code = int(words["code"])
        raise error
    agreed = words["agreed"]
    agreement = Agreement(
        **{**agreed, "names": tuple(agreed["names"]), "slots": tuple(agreed["slots"])}
    )
    stream = connection.stream
    return Meeting(
        agreement,
        address=plain(stream.getsockname()[0]),
        master=plain(stream.getpeername()[0]),
        connections={0: connection},
    )


def reach(master: str, port: int, deadline: float, wait_seconds: float, say: Say) -> Connection:
    """A connection to node 0, as soon as its name resolves and it answers."""
    news_at = time.monotonic() + NEWS_SECONDS
    while True:
        try:
            left = max(TRY_SECONDS, min(NEWS_SECONDS, deadline - time.monotonic()))
            return Connection(socket.create_connection((master, port), left))
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


def nodes_text(nodes: Sequence[int]) -> str:
    """The first few of some nodes, in words."""
    names = ", ".join(map(str, nodes[:5]))
    more = f" and {len(nodes) - 5} more" if len(nodes) > 5 else ""
    return f"node{'s' if len(nodes) > 1 else ''} {names}{more}"


def plain(address: str) -> str:
    """An IPv4 address that came over an IPv6 socket, as IPv4."""
    return address.removeprefix("::ffff:")
