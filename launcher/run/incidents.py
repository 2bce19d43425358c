"""What happened to hosts in runs, and what of it makes the next launch avoid one.

A file of a host (`launcher/remote/history.py`) has an `Incident` a line. It is read like anything
from elsewhere: what has not this shape is passed over, and what is old or lies in the future too.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

from launcher.errors import HostLost
from launcher.run.events import Event, Lost, Usage
from rackrun.shapes import AtMost, Between, Matches, Misshapen, parsed
from rackrun.terminal import one_line
from rackrun.units import age

Kind = Literal["lost", "gpu", "slow", "bytes", "failed", "done", "drained", "undrained"]
"""Lost; sick or throttled GPUs; a straggler; wrong bytes; the cause of a failure; a good end; taken
out of use, and back."""

LETTERS = 300
MOST_LINES = 128  # of a file, the newest
LINE_BYTES = 4096
MOST_OF_RUN = 8  # of a host
REMEMBERED_SECONDS = 14 * 86400.0
AHEAD_SECONDS = 86400.0  # by which the clock of another machine may differ
HEALING_SECONDS = 600.0  # a run so long that ends well makes up for what happened before
THROTTLED_REPORTS = 20  # of a GPU, one every 3 s: it is not a moment's heat
DOUBTFUL = {"slow": 2, "bytes": 2, "failed": 2}
"""The runs it takes to doubt a host: once, the program or the data may be at fault."""
AT_FAULT = re.compile(r"CUDA error|NCCL|nccl\w*Error|uncorrectable|Input/output error|Bus error")
"""In the message of a failed rank: the host may be to blame for it."""


@dataclass(frozen=True)
class Incident:
    """Something that happened to a host."""

    at: Annotated[float, Between(0, 1e11)]
    """In seconds since 1970."""
    kind: Kind
    text: Annotated[str, AtMost(LETTERS)] = ""
    run: Annotated[str, AtMost(255), Matches(r"[A-Za-z0-9._-]*")] = ""
    """The name of the run's folder; empty for what a person did."""
    by: Annotated[str, AtMost(64)] = ""
    """Who took the host out of use, or put it back."""

    def shown(self, now: float) -> str:
        """Return it in words: lost 2h05m ago in 20261122-093000-night: no heartbeat for 15 s."""
        who = f" by {self.by}" if self.by else ""
        what = f"{DESCRIPTIONS[self.kind]}{who} {age(now - self.at)} ago"
        where = f" in {self.run}" if self.run else ""
        return one_line(f"{what}{where}{self.text and f': {self.text}'}")


DESCRIPTIONS: Mapping[Kind, str] = {
    "lost": "lost",
    "gpu": "bad GPU",
    "slow": "slow",
    "bytes": "wrong bytes",
    "failed": "failed",
    "done": "did well",
    "drained": "drained",
    "undrained": "put back",
}


def lines_of(incidents: Iterable[Incident]) -> str:
    """Return incidents as lines of a file."""
    return "".join(f"{json.dumps(asdict(incident))}\n" for incident in incidents)


def incidents_in(text: str) -> Iterable[Incident]:
    """Yield the incidents in the newest lines of a file; what is none is passed over."""
    for line in text.splitlines()[-MOST_LINES:]:
        with suppress(Misshapen):
            yield parsed(line, Incident, LINE_BYTES)


@dataclass(frozen=True)
class History:
    """What is known of a host, the oldest first."""

    incidents: tuple[Incident, ...] = ()

    @property
    def drained(self) -> Incident | None:
        """Who took the host out of use, when and why; None if it may be used."""
        moves = [one for one in self.incidents if one.kind in ("drained", "undrained")]
        return moves[-1] if moves and moves[-1].kind == "drained" else None

    def troubles(self, now: float) -> list[Incident]:
        """Return what makes a launch avoid the host, where it has a choice.

        That is what has happened since a run of some length ended well there, in the last weeks.
        """
        since: list[Incident] = []
        for incident in self.incidents:
            if incident.kind in ("done", "undrained"):
                since.clear()
                continue
            # A little in the future, too: the clock of the machine that wrote it may be ahead.
            is_recent = -AHEAD_SECONDS <= now - incident.at <= REMEMBERED_SECONDS
            if is_recent and incident.kind != "drained":
                since.append(incident)
        runs = Counter(kind for kind, _ in {(one.kind, one.run) for one in since})
        return [one for one in since if runs[one.kind] >= DOUBTFUL.get(one.kind, 1)]

    def shown(self, now: float) -> str:
        """Return these troubles in words, the newest of each kind; empty if there are none."""
        newest = {incident.kind: incident for incident in self.troubles(now)}
        return "; ".join(incident.shown(now) for incident in newest.values())


def history(*texts: str) -> History:
    """Return what several files have of one host, each incident once."""
    unique = {incident for text in texts if text for incident in incidents_in(text)}
    return History(tuple(sorted(unique, key=lambda incident: incident.at)))


class IncidentLog:
    """The incidents of a run, as they happen."""

    def __init__(self) -> None:
        self._of_host: defaultdict[str, list[Incident]] = defaultdict(list)
        self._throttled: Counter[tuple[str, int]] = Counter()

    def add(self, host: str, kind: Kind, text: str) -> None:
        """Note an incident, once."""
        incidents, text = self._of_host[host], one_line(text)[:LETTERS]
        is_new = (kind, text) not in [(incident.kind, incident.text) for incident in incidents]
        if is_new and len(incidents) < MOST_OF_RUN:
            incidents.append(Incident(time.time(), kind, text))

    def take(self, event: Event, host: str) -> None:
        """Note what an event shows about a host."""
        match event:
            case Lost(exit_code=HostLost.exit_code):
                self.add(host, "lost", event.reason)
            case Usage():
                for number, gpu in enumerate(event.gpus):
                    self._throttled[host, number] += bool(gpu.slowed)
                    if gpu.slowed and self._throttled[host, number] == THROTTLED_REPORTS:
                        self.add(host, "gpu", f"GPU {number} slowed by {gpu.slowed}")

    def of_run(
        self, run: str, hosts: Sequence[str], is_interrupted: bool
    ) -> dict[str, tuple[Incident, ...]]:
        """Return the incidents of the run in a folder of this name, by host.

        Of several hosts that are all lost, none is to blame: our own network was. Who interrupts a
        run in a hurry waits for no host.
        """
        lost = [host for host in hosts if any(i.kind == "lost" for i in self._of_host[host])]
        none_is_lost = is_interrupted or len(lost) == len(hosts) > 1
        incidents = {
            host: tuple(
                replace(incident, run=run)
                for incident in self._of_host[host]
                if not (none_is_lost and incident.kind == "lost")
            )
            for host in hosts
        }
        return {host: of_host for host, of_host in incidents.items() if of_host}
