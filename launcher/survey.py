"""Asks every host what it is like, through a probe that is sent over, before a run is planned.

    1  every host      clock, look, code, shards (and GPUs in a full survey)
    2  the first one   listen on a free port: the master's
    3  every host      the route to the master, and whether its port answers

All hosts at once; nothing is judged here (that is `preflight`), and nothing is started. The probes
stay until the survey is closed, or until the agents of a run take over their processes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launcher import probe
from launcher.code import Code
from launcher.conversation import Answer, Conversation, Successor
from launcher.data import access_of
from launcher.errors import HostUnreachable, LauncherError
from launcher.hosts import Host
from launcher.image import Image
from launcher.parallel import AT_ONCE, each
from launcher.place import Place

LOOK_SECONDS = 60.0  # for each 64 hosts: as many are asked at once
FULL_SECONDS = 120.0
CLOCK_ROUNDS = 3
CLOCK_SECONDS = 0.5  # known as exactly as that, a clock needs no further look


@dataclass(frozen=True)
class Wanted:
    """What the run will need of every host."""

    workdir: str
    """Where hosts.txt does not say otherwise; relative to the home directory."""
    python: str = ""
    """The interpreter of the ranks, likewise; empty: the one of `.venv` there, else python3."""
    code: Code | None = None
    data: str = ""
    """The shard folder or URL that the ranks will read."""
    environment: tuple[tuple[str, str], ...] = ()
    """What is set for the ranks: some of it says who they are to a server of shards."""
    port: int = 0
    """The master's port; 0: one that is free there."""
    full: bool = False
    image: Image | None = None
    """The image that the ranks run in; None: they run on the host itself."""


@dataclass(frozen=True)
class Finding:
    """What is known about one host: the answers of its probe, by question."""

    host: Host
    error: LauncherError | None = None
    """Why nothing is known."""
    answers: Mapping[str, Answer] = field(default_factory=dict)

    @property
    def locks(self) -> tuple[tuple[str, bool], ...]:
        """What a run locks there: the host, or its share of the host and the GPUs it was given."""
        path = self["look"]["lock"]
        if not self.host.devices:
            return ((path, False),)
        gpus = ((f"{path}.gpu{device}", False) for device in self.host.devices)
        return ((path, True), *gpus)

    def __getitem__(self, question: str) -> Answer:
        """The answer to a question; empty when it was not asked."""
        return self.answers.get(question, {})


@dataclass(frozen=True)
class Survey:
    """All findings, in the hosts' order, and where the first of them can be met by the others."""

    findings: tuple[Finding, ...]
    master: str = ""
    port: int = 0
    talks: tuple[Conversation, ...] = ()
    """With the probe of every host that answers."""

    def successors(
        self, places: Sequence[Place], containers: Sequence[Sequence[str]]
    ) -> list[Successor]:
        """The hosts' places for a run, when all of them answered: its agents replace the probes."""
        found = zip(places, self.talks, containers, strict=True)
        return [Successor(*each) for each in found]

    def close(self) -> None:
        """End the probes that nobody took over."""
        for talk in self.talks:
            talk.close()


def survey(
    hosts: Sequence[Host], places: Sequence[Place | LauncherError], wanted: Wanted
) -> Survey:
    """Ask all hosts; what failed on a host is in its finding."""
    seconds = (FULL_SECONDS if wanted.full else LOOK_SECONDS) * (1 + len(hosts) // AT_ONCE)
    visits = [_Visit(host, place, wanted) for host, place in zip(hosts, places, strict=True)]
    _all(visits, _Visit.look, seconds)
    master, port = _meeting_point(visits, wanted)
    if port:
        token = visits[0].token
        _all(visits, lambda visit: visit.approach(master, port, token), seconds)
        _all(visits[:1], lambda visit: visit.ask("hush"), seconds)
    talks = tuple(visit.talk for visit in visits if visit.talk is not None)
    return Survey(tuple(visit.finding for visit in visits), master, port, talks)


def _all(visits: Sequence[_Visit], work: Any, seconds: float) -> None:
    """Do something on every host that answers, and note what fails as that host's error."""
    able = [visit for visit in visits if visit.finding.error is None]
    outcomes = each(work, able, seconds=seconds, late=_Visit.late)
    for visit, outcome in zip(able, outcomes, strict=True):
        if isinstance(outcome, LauncherError):
            visit.finding = replace(visit.finding, error=outcome)


def _meeting_point(visits: Sequence[_Visit], wanted: Wanted) -> tuple[str, int]:
    """The address and port of the first host for the others; port 0 when it has none to offer."""
    first = visits[0]
    if first.finding.error is not None:
        return "", 0
    address = first.host.address or first.finding["look"]["address"] or "127.0.0.1"
    if not first.host.address and first.host.interface:
        address = first.ask("address", interface=first.host.interface).get("address", address)
    if not wanted.full:
        _hold(first)
    listening = first.ask("listen", address=address, port=wanted.port, token=first.token)
    return address, listening.get("port", 0)


def _hold(first: _Visit) -> None:
    """Of two launches at the same time, the one that locks the first host in time goes on."""
    for path, shared in first.finding.locks:
        if first.ask("hold", path=path, shared=shared).get("holder"):
            return


class _Visit:
    """What we ask one host."""

    def __init__(self, host: Host, place: Place | LauncherError, wanted: Wanted) -> None:
        self.host = host
        self.place = place
        self.wanted = wanted
        self.token = secrets.token_hex(8)
        self.finding = Finding(host, place if isinstance(place, LauncherError) else None)
        self.talk: Conversation | None = None

    def look(self) -> None:
        """Everything that does not need the other hosts."""
        wanted, host = self.wanted, self.host
        assert not isinstance(self.place, LauncherError)
        self.talk = Conversation(self.place, probe, host.python or wanted.python)
        offset, uncertainty = self._clock()
        self._note("clock", {"offset": offset, "uncertainty": uncertainty})
        workdir, python = host.workdir or wanted.workdir, host.python or wanted.python
        self.ask("look", workdir=workdir, python=python, contained=wanted.image is not None)
        there = self.finding["look"]["workdir"]
        if wanted.image is not None and not self.finding["look"]["workdir_problem"]:
            self._look_into(wanted.image)
        self.ask("holders", paths=[path for path, shared in self.finding.locks if not shared])
        if wanted.full:
            self.ask("gpus")
        if wanted.code is not None:
            self.ask("code", root=there, files=dict(wanted.code.files))
        if wanted.data:
            self.ask(
                "shards",
                data=wanted.data,
                workdir=there,
                every_shard=wanted.full,
                environment=access_of((*wanted.environment, *host.env)),
            )

    def _look_into(self, image: Image) -> None:
        """The interpreter in a container, in place of the host's."""
        look = self.finding["look"]
        command = [*image.words(look), look["python"]]
        found = self.ask("image", name=image.name, command=command)
        self._note("look", {**look, "interpreter": found.get("interpreter", {})})

    def approach(self, address: str, port: int, token: str) -> None:
        """The way to the master."""
        self.ask("route", address=address)
        self.ask("reach", address=address, port=port, token=token)

    def ask(self, question: str, **words: object) -> Answer:
        """One order to the probe, and its answer, which is also noted."""
        assert self.talk is not None
        answer = self.talk.ask(question, **words)
        self._note(question, answer)
        return answer

    def late(self) -> HostUnreachable:
        """What is said about a host whose probe does not answer in time."""
        return HostUnreachable(f"{self.host.label}: does not answer our questions")

    def _clock(self) -> tuple[float, float]:
        """How far the host's clock is ahead, and how exactly we know: the best of few rounds."""
        rounds: list[tuple[float, float]] = []
        while len(rounds) < CLOCK_ROUNDS and (not rounds or min(rounds)[0] > CLOCK_SECONDS):
            before, began = time.time(), time.monotonic()
            there = self.ask("clock")["time"]
            took = time.monotonic() - began
            rounds.append((took / 2, there - before - took / 2))
        uncertainty, offset = min(rounds)
        return offset, uncertainty

    def _note(self, question: str, answer: Answer) -> None:
        self.finding = replace(self.finding, answers={**self.finding.answers, question: answer})
