"""This rank's line to the launcher, which alone decides who is in the group of an elastic run.

    rank -> launcher    ready PORT · formed G · broken G · left G
    launcher -> rank    an order: who is in the group from now on, and where it meets · the end

Packets are JSON on a socket of the host's agent. A thread takes them while the rank computes, or is
blocked in an exchange with a peer that is silent: it shuts down the TCP connections of a group that
the launcher has given up, and every exchange of the rank ends with an error at once. (`abort()` of
gloo's group returns at once, too, but wakes nobody: torch 2.15.)
"""

import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rackrun.contract import variables
from rackrun.errors import Problem, UsageError
from rackrun.shapes import AtMost, Between, Matches, Misshapen, parsed_json, shaped
from rackrun.terminal import clean
from rackrun.training.meeting_point import TOKEN_BYTES, MeetingPoint, store_port

MOST_BYTES = 1 << 16
MOST_RANKS = 1 << 16
FORMING_SECONDS = 60.0
"""In which a group must be there, its members' states equal; then the attempt is broken."""
WAITING_SECONDS = 120.0
"""In which the launcher must have found who was lost; then this rank's own error stands."""

KEEPING_SECONDS = 2.5  # less than an agent without a launcher leaves its ranks

Number = Annotated[int, Between(0, 1 << 40)]
Rank = Annotated[int, Between(0, MOST_RANKS)]


class Fenced(Problem):
    """This rank is out of the group, and must not speak for it any more."""

    exit_code = 75


@dataclass(frozen=True)
class GroupOrder:
    """A group that the launcher has ordered; its number grows with each."""

    generation: Number
    rank: Rank
    world: Annotated[int, Between(1, MOST_RANKS)]
    members: Annotated[tuple[Rank, ...], AtMost(MOST_RANKS)]
    """By rank, the number that each has for the whole run."""
    master: tuple[Annotated[str, AtMost(255)], Annotated[int, Between(1, 65535)]]
    """Where rank 0 listens."""
    token: Annotated[str, Matches(f"[0-9a-f]{{{2 * TOKEN_BYTES}}}")]
    """By which rank 0 knows the other members."""
    reason: Annotated[str, AtMost(1000)] = ""
    abort: bool = True
    """Whether a member was lost, so that no rank can finish a step of the group before."""

    def check(self, member: int) -> None:
        """Raise Misshapen unless it can be an order to the rank with this number."""
        if len(self.members) != self.world or len(set(self.members)) != self.world:
            raise Misshapen("members that are not as many as the world has")
        if not self.rank < self.world or self.members[self.rank] != member:
            raise Misshapen(f"not for member {member}")


@dataclass(frozen=True)
class End:
    """The launcher's order to end at once."""

    end: Annotated[str, AtMost(1000)]


class RankMembership:
    """What the launcher has ordered, and the connections of the group that this rank is in."""

    def __init__(self, path: str, member: int, local_rank: int) -> None:
        self.member = member
        self.current = 0
        """The generation that this rank is in, or tries to form."""
        self._meeting_point: MeetingPoint | None = None
        self._local_rank = local_rank
        self._changed = threading.Condition()
        self._newest: GroupOrder | None = None
        self._others = frozenset[str]()  # connections that were there before the group
        self._group: frozenset[str] | None = frozenset()  # its connections; None while it forms
        self._deadline = float("inf")
        self._left = False
        self._fenced = ""
        """Why this rank is out of the run for good."""
        self.abort: Callable[[], object] = lambda: None
        """Ends what runs of the group on a GPU: NCCL has connections that are not sockets."""
        self._agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._agent.connect(path)
        self._agent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 1, 0))
        threading.Thread(target=self._obey, name="membership", daemon=True).start()

    @property
    def is_superseded(self) -> bool:
        """Whether the launcher has ordered another group than the current one."""
        return self._newest is not None and self._newest.generation > self.current

    @property
    def is_broken(self) -> bool:
        """Whether no exchange of the current group can succeed any more."""
        newest = self._newest
        return newest is not None and newest.generation > self.current and newest.abort

    @property
    def is_fenced(self) -> bool:
        """Whether this rank is out of the run, and has a moment to keep its state."""
        return bool(self._fenced)

    def check_fence(self) -> None:
        """Raise Fenced if this rank is out of the run."""
        if self._fenced:
            raise Fenced(self._fenced)

    def announce(self) -> None:
        """Say that this rank can be a member, and lead: where others meet it if it is rank 0."""
        if not self._meeting_point:
            self._meeting_point = MeetingPoint()
        self._send(ready=self._meeting_point.port)

    def tell_members(self, order: GroupOrder, port: int) -> None:
        """Tell the other members of a group, as they come, the port of the store that rank 0 keeps.

        Raise ConnectionAbortedError when the group is not wanted any more.
        """
        assert self._meeting_point
        others = set(order.members) - {self.member}
        self._meeting_point.tell(bytes.fromhex(order.token), others, port, self.check_order)

    def store_port(self, order: GroupOrder) -> int:
        """Return the port of a group's store, which rank 0 tells the others once it has it.

        Raise ConnectionAbortedError when the group is not wanted any more.
        """
        token = bytes.fromhex(order.token)
        return store_port(order.master, token, self.member, self.check_order)

    def check_order(self) -> None:
        """Raise ConnectionAbortedError unless the group that this rank forms is still wanted."""
        self.check_fence()
        if self.is_superseded:
            raise ConnectionAbortedError("another group was ordered meanwhile")
        if time.monotonic() > self._deadline:
            raise ConnectionAbortedError(f"not formed within {FORMING_SECONDS:g} s")

    def awaited(self, seconds: float = float("inf")) -> GroupOrder | None:
        """Wait for a newer group than the current one; return None if none is ordered in time."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self.is_superseded:
                self.check_fence()
                if time.monotonic() >= deadline:
                    return None
                self._changed.wait(min(1.0, deadline - time.monotonic()))
            return self._newest

    @contextmanager
    def forming(self, order: GroupOrder) -> Iterator[None]:
        """Count the connections that are opened in this block as those of a group.

        Those of the group before end first. These end as soon as another group is ordered.
        """
        with self._changed:
            self._shut_down()
            self.current, self._group = order.generation, None
            self._others = frozenset(_connections())
            self._deadline = time.monotonic() + FORMING_SECONDS
        try:
            self.check_order()
            yield
        finally:
            with self._changed:
                self._group = frozenset(_connections()) - self._others
                self._deadline = float("inf")
                self._changed.notify_all()

    def formed(self, step: int, digest: str) -> None:
        """Say that this rank is in the current group, with the state after that many steps."""
        self._send(formed=self.current, step=step, digest=digest)
        self.announce()

    def broken(self, error: str) -> None:
        """Say that an exchange of the current group failed, and end its other exchanges, too.

        A peer may wait for this rank, and not for the one that was lost.
        """
        with self._changed:
            self._shut_down()
        self._send(broken=self.current, error=clean(error)[:1000])
        self.announce()

    def leave(self) -> None:
        """Say that this rank's training is over: its end is no loss, and no order concerns it."""
        self._left = True
        self._send(left=self.current)
        if self._meeting_point:
            self._meeting_point.close()

    def _send(self, **message: object) -> None:
        packet = json.dumps({"local": self._local_rank, **message}).encode()
        with suppress(BrokenPipeError, ConnectionResetError):  # the thread ends this process
            self._agent.sendall(packet)

    def _obey(self) -> None:
        while True:
            try:
                packet = self._agent.recv(MOST_BYTES + 1)
            except BlockingIOError:  # a second has passed (SO_RCVTIMEO): is a group overdue?
                with self._changed:
                    if time.monotonic() > self._deadline:
                        self._end_attempt()
                continue
            except OSError:  # as at its end
                packet = b""
            if self._left:
                self._agent.close()
                return
            try:
                self._follow(packet)
            except Misshapen as error:
                _end(f"an order of the launcher cannot be read: {error}")

    def _follow(self, packet: bytes) -> None:
        if not packet:
            _end("the agent of this host has ended")
        message = parsed_json(packet, MOST_BYTES)
        if isinstance(message, dict) and "end" in message:
            self._fence(shaped(message, End).end)
        order: GroupOrder = shaped(message, GroupOrder)
        order.check(self.member)
        with self._changed:
            if self._newest and order.generation <= self._newest.generation:
                return
            self._newest = order
            self._changed.notify_all()
            if order.abort:
                self._shut_down()
            self._end_attempt()

    def _fence(self, text: str) -> None:
        # This process may write its last whole step to its disk, and no more. The main thread does
        # that as soon as its exchange has failed, and ends by itself; else it is ended here.
        end_at = time.monotonic() + KEEPING_SECONDS
        with self._changed:
            self._fenced = clean(text)
            self._changed.notify_all()
            while (left := end_at - time.monotonic()) > 0:
                self._shut_down()  # also what a group that forms still opens
                self._changed.wait(min(left, 0.1))
        _end(text)

    def _end_attempt(self) -> None:
        # A group that forms opens connections meanwhile, each of which may wait for a lost member.
        attempt = self.current
        while self._group is None and self.current == attempt:
            self._shut_down()
            self._changed.wait(0.02)

    def _shut_down(self) -> None:
        # Every exchange of the current group fails from here on.
        self.abort()
        for name, number in _connections().items():
            if name not in self._others if self._group is None else name in self._group:
                _shut_down(name, number)


def _connections() -> dict[str, int]:
    # This process's TCP connections by the kernel's name of each: torch has no list of those that
    # a group has opened.
    sockets = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            name, number = str(entry.readlink()), int(entry.name)
            if not name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()  # OSError for what listens
                    sockets[name] = number
    return sockets


def _shut_down(name: str, number: int) -> None:
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
        # The number may belong to another socket by now.
        if str(Path(f"/proc/self/fd/{connection.fileno()}").readlink()) == name:
            connection.shutdown(socket.SHUT_RDWR)


def _end(text: str) -> None:
    # At once: nothing that the main thread still does may have an effect outside.
    sys.stderr.write(f"{clean(text)}\n")
    sys.stderr.flush()
    os._exit(Fenced.exit_code)


def membership_here() -> RankMembership:
    """Return this rank's line to the launcher; UsageError where there is none."""
    path = os.environ.get(variables.MEMBERSHIP)
    if not path:
        raise UsageError("--elastic is an option of run-ssh and run-local: type it before the task")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    return RankMembership(path, int(os.environ[variables.FIRST_RANK]) + local_rank, local_rank)
