"""What launcher and agent say to each other: orders as bytes, and bytes as events."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from launcher.errors import HostLost, PreflightRefused
from launcher.remote import agent
from launcher.run.events import (
    AskedToStop,
    Closed,
    Event,
    Frozen,
    Joined,
    Lost,
    Opened,
    Output,
    RankEnded,
    RankStarted,
    Report,
    Stopping,
    TorchrunEnded,
    Unreached,
    Usage,
)
from launcher.run.job import Limits
from launcher.run.plan import Environment, HostPlan
from launcher.supervision.reports import believed
from launcher.transport.bootstrap import order
from launcher.transport.bundle import packed
from rackrun.shapes import Misshapen, parsed_json, shaped

NOISE_BYTES = 1 << 16  # what a login shell may print before the agent speaks
NONSENSE = "sent something that no agent of ours would say"
FRAME_BYTES = 1 << 20  # no frame of ours is longer


def opening(order: bytes) -> bytes:
    """What a new agent reads first: its program and its order."""
    return packed(agent) + order


def run_order(plan: HostPlan, limits: Limits, secrets: Environment = ()) -> bytes:
    """Start what the plan says, under these limits, with variables that are in no plan."""
    known = dataclasses.asdict(plan)
    return order(
        do="run",
        lease_seconds=limits.lease_seconds,
        grace_seconds=limits.grace_seconds,
        **{**known, "environment": (*plan.environment, *secrets)},
    )


def sweep_order(plan: HostPlan) -> bytes:
    """End what a lost agent has left of the plan."""
    return order(do="sweep", scratch=plan.scratch, locks=plan.locks)


def stop_order(signum: int, grace_seconds: float) -> bytes:
    """Send every rank a signal; after the grace, SIGKILL whatever is left of the run."""
    return order(do="stop", signal=int(signum), grace_seconds=grace_seconds)


def reach_order(doors: Sequence[tuple[str, int]], seconds: float) -> bytes:
    """Try to reach other hosts, at their doors, for so long; the answer is `Unreached`."""
    return order(do="reach", doors=list(doors), seconds=seconds)


BEAT = order(do="beat")
"""Renews the lease."""


RANK_EVENTS: dict[str, type[Event]] = {
    "started": RankStarted,
    "ended": RankEnded,
    "asked-to-stop": AskedToStop,
}
HOST_EVENTS: dict[str, type[Event]] = {
    "opened": Opened,
    "frozen": Frozen,
    "joined": Joined,
    "torchrun-ended": TorchrunEnded,
    "usage": Usage,
    "stopping": Stopping,
    "unreached": Unreached,
    "refused": Lost,
    "closed": Closed,
}


class Decoder:
    """Turns the bytes of one agent into events, however they are cut.

    An agent speaks for its own host and ranks only; whatever else arrives is a host to be lost.
    """

    def __init__(self, plan: HostPlan) -> None:
        """Events carry the node of the plan and global ranks."""
        self.node = plan.node
        self.numbers: dict[int, int | None] = {agent.NOBODY: None}
        """Of ranks among all of them, by their numbers here: for no others may this host speak."""
        for local in range(plan.processes):
            self.numbers[local] = plan.first_rank + local
        self.speaking = False
        self.rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that are complete now; raises HostLost when this is not our agent."""
        self.rest += data
        if not self.speaking and not self.skip_noise():
            return
        start, head = 0, agent.HEADER.size
        while len(self.rest) - start >= head:
            kind, local, length = agent.HEADER.unpack_from(self.rest, start)
            end = start + head + length
            if length > FRAME_BYTES:
                raise HostLost(NONSENSE)
            if len(self.rest) < end:
                break
            try:
                yield from self.event(kind, local, bytes(self.rest[start + head : end]))
            except Misshapen as error:
                raise HostLost(f"{NONSENSE}: {error}") from error
            start = end
        del self.rest[:start]

    def skip_noise(self) -> bool:
        """Drop what comes before the agent's marker; whether the marker was there."""
        noise, marker, rest = self.rest.partition(agent.MARKER)
        if marker:
            self.speaking, self.rest = True, rest
        elif len(noise) > NOISE_BYTES:
            raise HostLost("prints a lot at login, but no agent answers")
        return self.speaking

    def event(self, kind: int, local: int, payload: bytes) -> Iterator[Event]:
        """The event in one frame; a report may be none that we know."""
        if local not in self.numbers:
            raise Misshapen(f"frame: of rank {local} of {len(self.numbers) - 1}")
        if kind == agent.OUT:
            yield Output(self.node, self.numbers[local], "out", payload)
        elif kind == agent.ERR:
            yield Output(self.node, self.numbers[local], "err", payload)
        elif kind == agent.EVENT:
            yield self.told(parsed_json(payload, FRAME_BYTES), self.numbers[local])
        elif kind == agent.REPORT:
            yield from self.reported(payload, self.numbers[local])
        else:
            raise Misshapen(f"frame: of kind {kind}")

    def reported(self, payload: bytes, rank: int | None) -> Iterator[Event]:
        """What a rank says of its progress, if anything of it is believed."""
        if rank is None:
            raise Misshapen("report: of no rank")
        if fields := believed(payload):
            yield Report(self.node, rank, fields)

    def told(self, said: Any, rank: int | None) -> Event:
        """What an agent's own words mean; their fields are those of the event."""
        name = said.pop("event", None) if isinstance(said, dict) else None
        if isinstance(name, str) and name in RANK_EVENTS:
            return self.shaped(RANK_EVENTS[name], {**said, "rank": rank})
        if isinstance(name, str) and name in HOST_EVENTS:
            ours = {"exit_code": PreflightRefused.exit_code} if name == "refused" else {}
            return self.shaped(HOST_EVENTS[name], {**said, **ours})
        raise Misshapen("event: of no kind that we know")

    def shaped(self, shape: type[Event], fields: dict[str, Any]) -> Event:
        """An event of this host."""
        found: Event = shaped({**fields, "node": self.node}, shape, "event")
        return found
