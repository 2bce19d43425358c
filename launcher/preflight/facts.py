"""Asks every host what it is like, through a probe that is sent over, before a run is planned.

    1  every host      look; then code, shards (and GPUs in a full survey)
    2  the first one   listen on a free port: the master's
    3  every host      the route to the master, and whether its port answers

All hosts at once, and each is waited for as rarely as can be: the first order travels along with
the probe, and what does not need another's answer is ordered together. Nothing is judged here (that
is `preflight`), and nothing is started. The probes stay until the survey is closed, or until the
agents of a run take over their processes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from launcher.errors import HostUnreachable
from launcher.files.working_tree import WorkingTree
from launcher.preflight.answers import believed
from launcher.remote import ports, probe
from launcher.run.container import ContainerSpec
from launcher.run.hosts import Host
from launcher.transport.base import Transport
from launcher.transport.bootstrap import order
from launcher.transport.parallel import AT_ONCE, each
from launcher.transport.rpc import Answer, Handover, RpcClient
from rackrun.contract import variables
from rackrun.errors import Problem
from rackrun.shapes import Misshapen

LOOK_SECONDS = 60.0  # for each 64 hosts: as many are asked at once
FULL_SECONDS = 120.0
PROBE_SECONDS = 2 * FULL_SECONDS  # for an answer: a host that is late is given up before
CLOCK_ROUNDS = 3
CLOCK_SECONDS = 1.0  # known as exactly as that, a clock needs no further look


@dataclass(frozen=True)
class Requirements:
    """Requirements of a run that every host must meet."""

    workdir: str
    """Unless hosts.txt names another; relative to the home directory."""
    python: str = ""
    """The interpreter of the ranks, likewise; empty: the one of `.venv` there, else python3."""
    code: WorkingTree | None = None
    data: str = ""
    """The shard folder or URL that the ranks will read."""
    environment: tuple[tuple[str, str], ...] = ()
    """What is set for the ranks; some of it authenticates them to a server of shards."""
    port: int = 0
    """The master's port; 0: one that is free there."""
    full: bool = False
    on_cpu: bool = False
    """The task trains on the CPU, so GPUs do not matter."""
    place: str = ""
    """The launch's place in the queue, as text to sort; empty: before all."""
    waits: bool = False
    """It queues when hosts are busy."""
    image: ContainerSpec | None = None
    """The image that the ranks run in; None: they run on the host itself."""


@dataclass(frozen=True)
class HostFacts:
    """Facts about one host: the answers of its probe, by question."""

    host: Host
    error: Problem | None = None
    """Why nothing is known."""
    answers: Mapping[str, Answer] = field(default_factory=dict)

    @property
    def locks(self) -> tuple[tuple[str, bool], ...]:
        """Return the locks of a run: the host, or its share of it and the GPUs it was given."""
        path = self["look"]["lock"]
        alone = tuple((path + part, False) for part in parts_of(self.host))
        return ((path, True), *alone) if self.host.devices else alone

    def __getitem__(self, question: str) -> Answer:
        """Return the answer to a question; empty when it was not asked."""
        return self.answers.get(question, {})


def parts_of(host: Host) -> list[str]:
    """Return what a run holds of a host, as endings of lock files: all, or some GPUs."""
    return [f".gpu{device}" for device in host.devices] if host.devices else [""]


@dataclass(frozen=True)
class FactGatherer:
    """All findings, in the hosts' order, and where the first of them can be met by the others."""

    findings: tuple[HostFacts, ...]
    master: str = ""
    port: int = 0
    talks: tuple[RpcClient, ...] = ()
    """With the probe of every host that answers."""
    on_cpu: bool = False
    """No rank will use a GPU."""

    @property
    def versions(self) -> str:
        """Return the versions of torch and of the driver on these hosts, as far as known."""
        hosts = [host for host in self.findings if host.error is None]
        torches = {str(host["look"]["interpreter"].get("torch", "")) for host in hosts}
        drivers = {str(host["gpus"].get("driver", "")).partition(".")[0] for host in hosts}
        shown = (("torch", torches), ("driver", set() if self.on_cpu else drivers))
        return ", ".join(
            f"{what} {' and '.join(sorted(found - {''}))}" for what, found in shown if any(found)
        )

    def successors(
        self, places: Sequence[Transport], containers: Sequence[Sequence[str]]
    ) -> list[Handover]:
        """Return the hosts' places for a run whose probes all answered: its agents replace them."""
        found = zip(places, self.talks, containers, strict=True)
        return [Handover(*each) for each in found]

    def first(self, count: int) -> FactGatherer:
        """Return the first few hosts' facts; the probes of the others end."""
        for talk in self.talks[count:]:
            talk.close()
        return replace(self, findings=self.findings[:count], talks=self.talks[:count])

    def unlock(self) -> None:
        """Let other launches have the first host; places in the line are kept."""
        for talk in self.talks[:1]:
            with suppress(HostUnreachable):  # the next look has the reason
                talk.call("unlock")

    def close(self) -> None:
        """End the probes that no agent took over."""
        for talk in self.talks:
            talk.close()


def first_answer(survey: FactGatherer) -> HostFacts:
    """Return the host that others are compared with: the first one that answered."""
    return next(finding for finding in survey.findings if finding.error is None)


def survey(
    hosts: Sequence[Host], places: Sequence[Transport | Problem], wanted: Requirements
) -> FactGatherer:
    """Ask all hosts; what failed on a host is in its finding."""
    seconds = (FULL_SECONDS if wanted.full else LOOK_SECONDS) * (1 + len(hosts) // AT_ONCE)
    visits = [HostProbe(host, place, wanted) for host, place in zip(hosts, places, strict=True)]
    _all(visits, HostProbe.look, seconds)
    offers: list[tuple[str, int]] = []
    _all(visits[:1], lambda first: offers.append(_meeting_point(first, wanted)), seconds)
    master, port = offers[0] if offers else ("", 0)
    if port:
        token = visits[0].token
        _all(visits, lambda visit: visit.approach(master, port, token), seconds)
        _all(visits[:1], lambda visit: visit.ask("hush"), seconds)
    talks = tuple(visit.talk for visit in visits if visit.talk is not None)
    findings = tuple(visit.finding for visit in visits)
    return FactGatherer(findings, master, port, talks, wanted.on_cpu)


def _all(visits: Sequence[HostProbe], work: Any, seconds: float) -> None:
    """Do something on every host that answers, and note what fails as that host's error."""
    able = [visit for visit in visits if visit.finding.error is None]
    outcomes = each(work, able, seconds=seconds, late=HostProbe.late)
    for visit, outcome in zip(able, outcomes, strict=True):
        if isinstance(outcome, Problem):
            visit.finding = replace(visit.finding, error=outcome)


def _meeting_point(first: HostProbe, wanted: Requirements) -> tuple[str, int]:
    """Return the first host's address and port for the others; port 0 when it has none to offer."""
    own = first.finding["address"].get("address") or first.finding["look"]["address"]
    address = first.host.address or own or "127.0.0.1"
    if not wanted.full and not first.finding["look"]["holder"]:
        _hold(first)
    listening = first.ask("listen", address=address, port=wanted.port, token=first.token)
    return address, listening.get("port", 0)


def _hold(first: HostProbe) -> None:
    """Lock the first host: of two launches at the same time, the first to lock it goes on."""
    for path, shared in first.finding.locks:
        if first.ask("hold", path=path, shared=shared).get("holder"):
            return


class HostProbe:
    """Questions to one host."""

    def __init__(self, host: Host, place: Transport | Problem, wanted: Requirements) -> None:
        self.host = host
        self.place = place
        self.wanted = wanted
        self.token = secrets.token_hex(8)
        self.finding = HostFacts(host, place if isinstance(place, Problem) else None)
        self.talk: RpcClient | None = None

    def look(self) -> None:
        """Ask everything that does not need the other hosts."""
        wanted, host = self.wanted, self.host
        self._tell_clock([self._compared(self._begin)])
        there = self.finding["look"]["workdir"]
        if wanted.image is not None and not self.finding["look"]["workdir_problem"]:
            self._look_into(wanted.image)
        questions: dict[str, dict[str, object]] = {}
        if host.interface:
            questions["address"] = {"interface": host.interface}
        if wanted.code is not None:
            questions["code"] = {"root": there, "files": dict(wanted.code.files)}
        if wanted.data:
            questions["shards"] = {
                "data": wanted.data,
                "workdir": there,
                "every_shard": wanted.full,
                "environment": _access_of((*wanted.environment, *host.env)),
            }
        if wanted.full or (self.finding["look"]["gpus"] and not wanted.on_cpu):
            questions["gpus"] = {
                "full": wanted.full
            }  # last: nothing else is read while nvidia-smi works
        self._ask_all(questions)

    def _begin(self) -> Answer:
        """Start the probe; its first look."""
        wanted, host = self.wanted, self.host
        assert not isinstance(self.place, Problem)
        python = host.python or wanted.python
        first = order(
            do="look",
            workdir=host.workdir or wanted.workdir,
            python=python,
            parts=parts_of(host),
            contained=wanted.image is not None,
            place=wanted.place,
            waits=wanted.waits,
        )
        self.talk = RpcClient(self.place, probe, python, first, PROBE_SECONDS)
        found = self._note("look", self.talk.answer())
        if "error" in found:
            raise HostUnreachable(f"{host.label}: cannot look around there: {found['error']}")
        return found

    def _look_into(self, image: ContainerSpec) -> None:
        """Inspect the interpreter in a container, in place of the host's."""
        look = self.finding["look"]
        command = [*image.words(look), look["python"]]
        found = self.ask("image", name=image.name, command=command)
        self._note("look", {**look, "interpreter": found.get("interpreter", {})})

    def approach(self, address: str, port: int, token: str) -> None:
        """Test the way to the master, whose listener proves that it knows the token."""
        number = secrets.token_bytes(ports.NONCE_BYTES)
        expected = ports.proof(token.encode(), number).hex()
        reach = {"address": address, "port": port, "number": number.hex(), "expected": expected}
        self._ask_all({"route": {"address": address}, "reach": reach})

    def ask(self, question: str, **words: object) -> Answer:
        """Send the probe one order; note its answer and return it."""
        assert self.talk is not None
        return self._note(question, self.talk.call(question, **words))

    def _ask_all(self, questions: Mapping[str, Mapping[str, object]]) -> None:
        """Send several orders at once, and then take their answers."""
        assert self.talk is not None
        for question, words in questions.items():
            self.talk.order(question, **words)
        for question in questions:
            self._note(question, self.talk.answer())

    def late(self) -> HostUnreachable:
        """Return the error for a host whose probe does not answer in time."""
        return HostUnreachable(f"{self.host.label}: does not answer our questions")

    def _tell_clock(self, rounds: list[tuple[float, float]]) -> None:
        """Note how far the host's clock is ahead, and how exactly we know: the best of few rounds.

        What came with the first look is enough, unless the host was slow to start the probe.
        """
        while min(rounds)[0] > CLOCK_SECONDS and len(rounds) < CLOCK_ROUNDS:
            rounds.append(self._compared(partial(self.ask, "clock")))
        uncertainty, offset = min(rounds)
        self._keep("clock", {"offset": offset, "uncertainty": uncertainty})

    @staticmethod
    def _compared(ask: Callable[[], Answer]) -> tuple[float, float]:
        """Return the seconds of uncertainty, and by how many the host's clock is ahead of ours."""
        before, began = time.time(), time.monotonic()
        there = ask()["time"]
        half = (time.monotonic() - began) / 2
        return half, there - before - half

    def _note(self, question: str, answer: Answer) -> Answer:
        """Keep an answer that has the shape of a probe's."""
        try:
            believed(question, answer)
        except Misshapen as error:
            nonsense = f"{self.host.label}: its answer is not that of the probe ({error})"
            raise HostUnreachable(nonsense) from None
        return self._keep(question, answer)

    def _keep(self, question: str, answer: Answer) -> Answer:
        self.finding = replace(self.finding, answers={**self.finding.answers, question: answer})
        return answer


def _access_of(environment: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the part of the ranks' environment that concerns access to a server of shards."""
    return {name: value for name, value in environment if name in variables.ACCESS}
