"""The protocol between launcher and agent: orders as bytes, and bytes as events."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rackrun.launcher.errors import HostLost, PreflightRefused
from rackrun.launcher.remote.agent import frames
from rackrun.launcher.run.events import (
    AskedToStop,
    Closed,
    Computing,
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
from rackrun.launcher.run.plan import HostPlan
from rackrun.launcher.run.planned_host import Environment
from rackrun.launcher.run.settings import Limits
from rackrun.launcher.supervision.reports import valid_fields
from rackrun.launcher.transport.bootstrap import order
from rackrun.shapes import Misshapen, parsed_json, shaped

NONSENSE = "sent data that is not the agent protocol"
FRAME_BYTES = 1 << 20  # agents send no longer frames


def run_order(plan: HostPlan, limits: Limits, secrets: Environment = ()) -> bytes:
    """Order the start of a host's ranks; `secrets` are variables that are in no plan on disk."""
    fields = dataclasses.asdict(plan)
    return order(
        do="run",
        lease_seconds=limits.lease_seconds,
        **{**fields, "environment": (*plan.environment, *secrets)},
    )


def sweep_order(plan: HostPlan) -> bytes:
    """Order the end of all processes that a lost agent has left."""
    return order(do="sweep", scratch=plan.scratch)


def stop_order(signum: int, grace_seconds: float) -> bytes:
    """Order a signal to every rank and, after the grace period, SIGKILL."""
    return order(do="stop", signal=int(signum), grace_seconds=grace_seconds)


def reach_order(ports: Sequence[tuple[str, int]], seconds: float) -> bytes:
    """Order a test of which hosts, as (address, port), can be reached; answered by `Unreached`."""
    return order(do="reach", ports=list(ports), seconds=seconds)


BEAT = order(do="beat")
"""The heartbeat: an agent that gets none for its timeout ends the run on its host."""


RANK_EVENTS: dict[str, type[Event]] = {
    "started": RankStarted,
    "ended": RankEnded,
    "asked-to-stop": AskedToStop,
    "computing": Computing,
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
    """Turns the bytes of one agent into events.

    An agent may report only on its own host and ranks: a host may be compromised, and must not be
    able to end another one. Anything else raises HostLost.
    """

    def __init__(self, plan: HostPlan) -> None:
        self._node = plan.node
        self._ranks: dict[int, int | None] = {frames.NO_RANK: None}
        """Global ranks by local ones."""
        for local in range(plan.processes):
            self._ranks[local] = plan.first_rank + local
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yield the events that are complete now; raise HostLost for what is not the protocol."""
        self._rest += data
        start, head = 0, frames.HEADER.size
        while len(self._rest) - start >= head:
            kind, local, length = frames.HEADER.unpack_from(self._rest, start)
            end = start + head + length
            # Before waiting for the rest: a host must not make the launcher buffer without limit.
            if length > FRAME_BYTES:
                raise HostLost(NONSENSE)
            if len(self._rest) < end:
                break
            try:
                yield from self._events(kind, local, bytes(self._rest[start + head : end]))
            except Misshapen as error:
                raise HostLost(f"{NONSENSE}: {error}") from error
            start = end
        del self._rest[:start]

    def _events(self, kind: int, local: int, payload: bytes) -> Iterator[Event]:
        if local not in self._ranks:
            raise Misshapen(f"frame: of rank {local} of {len(self._ranks) - 1}")
        if kind == frames.OUT:
            yield Output(self._node, self._ranks[local], "out", payload)
        elif kind == frames.ERR:
            yield Output(self._node, self._ranks[local], "err", payload)
        elif kind == frames.EVENT:
            yield self._parsed(parsed_json(payload, FRAME_BYTES), self._ranks[local])
        elif kind == frames.REPORT:
            if (rank := self._ranks[local]) is None:
                raise Misshapen("report: of no rank")
            if (report := valid_fields(payload)) is not None:  # a rank may send anything
                yield Report(self._node, rank, report)
        else:
            raise Misshapen(f"frame: of kind {kind}")

    def _parsed(self, message: Any, rank: int | None) -> Event:
        name = message.pop("event", None) if isinstance(message, dict) else None
        if isinstance(name, str) and name in RANK_EVENTS:
            return self._shaped(RANK_EVENTS[name], {**message, "rank": rank})
        if isinstance(name, str) and name in HOST_EVENTS:
            # Not from the message: no host may choose the exit code of the run.
            ours = {"exit_code": PreflightRefused.exit_code} if name == "refused" else {}
            return self._shaped(HOST_EVENTS[name], {**message, **ours})
        raise Misshapen("event: of an unknown kind")

    def _shaped(self, shape: type[Event], fields: dict[str, Any]) -> Event:
        # The node comes last, so that no message can name another one.
        event: Event = shaped({**fields, "node": self._node}, shape, "event")
        return event
