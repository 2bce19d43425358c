"""Asks every host what it is like, through a probe that is sent over, before a run is planned.

    1  every host      the basics; then code, shards (and GPUs in a full preflight)
    2  the first one   lock it, and listen on a free port: the master's
    3  every host      the route to the master, and whether its port can be reached

All hosts at once, and what does not need another's reply is ordered together. Nothing is judged
here (that is `checks`), and nothing is started. The probes stay, and with them lock and port, until
the facts are closed, or until the agents of a run take over their processes.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from rackrun.contract import variables
from rackrun.errors import Problem
from rackrun.launcher.errors import HostUnreachable
from rackrun.launcher.preflight.replies import (
    Basics,
    Code,
    Gpus,
    Hold,
    Image,
    Listen,
    R,
    Route,
    Shards,
    checked_reply,
)
from rackrun.launcher.preflight.requirements import Requirements
from rackrun.launcher.remote.gpus import VISIBLE
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.run.job import Command
from rackrun.launcher.transport.base import Transport
from rackrun.launcher.transport.parallel import AT_ONCE, each
from rackrun.launcher.transport.rpc import RpcClient

LOOK_SECONDS = 60.0  # for each 64 hosts: as many are asked at once
FULL_SECONDS = 120.0
PROBE_SECONDS = 2 * FULL_SECONDS  # for a reply: a host that is late is given up before


@dataclass
class HostFacts:
    """Facts about one host: the replies of its probe, by their shape."""

    host: Host
    error: Problem | None = None
    """Why nothing is known."""
    replies: dict[type, Any] = field(default_factory=dict)
    clock_ahead: float = 0.0
    """Seconds by which its clock is ahead of ours, give or take `clock_error`."""
    clock_error: float = 0.0
    client: RpcClient | None = field(default=None, compare=False)
    """The probe that answered, and still runs."""

    @property
    def locks(self) -> tuple[tuple[str, bool], ...]:
        """Return the locks of a run: the host, or its share of it and the GPUs it was given."""
        path = self.basics.lock
        alone = tuple((path + part, False) for part in parts_of(self.host))
        return ((path, True), *alone) if self.host.devices else alone

    @property
    def basics(self) -> Basics:
        """Return what every host was asked first."""
        return self[Basics]

    def __getitem__(self, shape: type[R]) -> R:
        """Return the reply of this shape; an empty one when it was not asked for."""
        return self.replies.get(shape) or shape()


def parts_of(host: Host) -> list[str]:
    """Return what a run holds of a host, as endings of lock files: all, or some GPUs."""
    return [f".gpu{device}" for device in host.devices] if host.devices else [""]


@dataclass(frozen=True)
class ClusterFacts:
    """The facts about all hosts, in their order, and where the others can meet the first one."""

    hosts: tuple[HostFacts, ...]
    master: str = ""
    port: int = 0
    requirements: Requirements = Requirements(Command(()))
    """What the hosts were asked about."""

    @property
    def ranks(self) -> int:
        """Return the number of ranks that these hosts would have together."""
        return sum(host.host.processes(host.basics.gpus) for host in self.hosts)

    @property
    def versions(self) -> str:
        """Return the versions of torch and of the driver on these hosts, as far as known."""
        hosts = [host for host in self.hosts if host.error is None]
        torches = {host.basics.interpreter.torch for host in hosts}
        drivers = {host[Gpus].driver.partition(".")[0] for host in hosts}
        shown = (("torch", torches), ("driver", set() if self.requirements.on_cpu else drivers))
        return ", ".join(
            f"{what} {' and '.join(sorted(kinds - {''}))}" for what, kinds in shown if any(kinds)
        )

    @property
    def probes(self) -> list[RpcClient | None]:
        """Return the probes, which may become the agents of a run."""
        return [facts.client for facts in self.hosts]

    def first(self, count: int) -> ClusterFacts:
        """Return the first few hosts' facts; the probes of the others end."""
        replace(self, hosts=self.hosts[count:]).close()
        return replace(self, hosts=self.hosts[:count])

    def of(self, hosts: Sequence[Host]) -> ClusterFacts:
        """Return the facts of these hosts, in their order, with the GPUs that they name now."""
        facts_of = {facts.host.label: facts for facts in self.hosts}
        return replace(self, hosts=tuple(replace(facts_of[h.label], host=h) for h in hosts))

    def hold(self) -> bool:
        """Lock all hosts for this launch; return False, with none locked, if one cannot be."""
        outcomes = each(_held, self.hosts, seconds=LOOK_SECONDS)
        if all(outcome is True for outcome in outcomes):
            return True
        each(_unlock, self.hosts, seconds=LOOK_SECONDS)
        return False

    def unlock(self) -> None:
        """Let other launches have the hosts that are locked; places in the line are kept."""
        each(_unlock, self.hosts, seconds=LOOK_SECONDS)

    def close(self, besides: ClusterFacts | None = None) -> None:
        """End the probes that no agent took over, but for those of newer facts."""
        kept = {id(facts.client) for facts in besides.hosts} if besides else set()
        for facts in self.hosts:
            if facts.client is not None and id(facts.client) not in kept:
                facts.client.close()


NO_FACTS = ClusterFacts(())


def _held(facts: HostFacts) -> bool:
    assert facts.client is not None
    reply = facts.client.call("hold", wanted=facts.locks)
    held = checked_reply(reply, Hold, facts.host.label)
    return not (held.holder or held.error)  # else another launch was faster


def _unlock(facts: HostFacts) -> None:
    with suppress(HostUnreachable):  # the next look has the reason
        if facts.client is not None:
            facts.client.call("unlock")


def first_responding(cluster: ClusterFacts) -> HostFacts:
    """Return the host that others are compared with: the first one that answered."""
    return next(facts for facts in cluster.hosts if facts.error is None)


def gather_facts(
    hosts: Sequence[Host],
    transports: Sequence[Transport | Problem],
    requirements: Requirements,
    earlier: ClusterFacts = NO_FACTS,
) -> ClusterFacts:
    """Ask all hosts; what failed on a host is in its facts. Probes of earlier facts are used."""
    seconds = (FULL_SECONDS if requirements.full else LOOK_SECONDS) * (1 + len(hosts) // AT_ONCE)
    clients = {facts.host.label: facts.client for facts in earlier.hosts if facts.error is None}
    probes = [
        HostProbe(HostFacts(host, client=clients.get(host.label)), transport, requirements)
        for host, transport in zip(hosts, transports, strict=True)
    ]
    _all(probes, HostProbe.ask_about_host, seconds)
    offers: list[tuple[str, int]] = []  # none where the first host has failed
    other = _another_address(probes)
    _all(probes[:1], lambda first: offers.append(first.lock_and_listen(other)), seconds)
    master, port = offers[0] if offers else ("", 0)
    if port:
        first = probes[0]
        _all(
            probes,
            lambda probe: probe.test_route(master, port, other if probe is first else ""),
            seconds,
        )
    return ClusterFacts(tuple(probe.facts for probe in probes), master, port, requirements)


def _another_address(probes: Sequence[HostProbe]) -> str:
    """Return the address of a host behind the first; empty where all are on loopback."""
    for probe in probes[1:]:
        if probe.facts.error is None:
            address = probe.facts.host.address or probe.facts.basics.address
            if address and not is_loopback(address):
                return address
    return ""


def is_loopback(address: str) -> bool:
    """Return True for an address of the host itself, False for a name: the host resolves it."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _all(probes: Sequence[HostProbe], action: Any, seconds: float) -> None:
    able = [probe for probe in probes if probe.facts.error is None]
    outcomes = each(action, able, seconds=seconds, late=HostProbe.late)
    for probe, outcome in zip(able, outcomes, strict=True):
        if isinstance(outcome, Problem):
            probe.facts.error = outcome


class HostProbe:
    """Questions to one host, whose replies become its facts."""

    def __init__(
        self, facts: HostFacts, transport: Transport | Problem, requirements: Requirements
    ) -> None:
        """Ask through the client of the facts, or through a new probe if it has none, or ended."""
        self.facts = facts
        self.transport = transport
        self.requirements = requirements
        if isinstance(transport, Problem):
            facts.error = transport

    def ask_about_host(self) -> None:
        """Ask everything that does not need the other hosts."""
        requirements, host = self.requirements, self.facts.host
        basics, image = self._ask_basics(), requirements.image
        command = [*host.setup_words, *([basics.workdir] if host.setup else ()), basics.python]
        if image is not None and "workdir" not in basics.problems:
            command = [
                *image.docker_run(basics.user, basics.workdir, basics.gpus > 0),
                basics.python,
            ]
            inspected = self._ask(
                Image,
                name=image.name,
                command=command,
                packages=requirements.task_needs.imports,
                workdir=basics.workdir,
            )
            # The ranks run on the interpreter of the container, in place of the host's.
            basics = structs.replace(basics, interpreter=inspected.interpreter)
            self.facts.replies[Basics] = basics
        orders: dict[type[Any], dict[str, object]] = {}
        if requirements.code and requirements.code.files:
            orders[Code] = {"root": basics.workdir, "files": dict(requirements.code.files)}
        is_startable = "workdir" not in basics.problems and not basics.interpreter.error
        if requirements.data and is_startable:
            environment = (*requirements.environment, *host.env)
            orders[Shards] = {
                "data": requirements.data,
                "command": command,
                "workdir": basics.workdir,
                "every_shard": requirements.full,
                "environment": {n: value for n, value in environment if n in variables.ACCESS},
            }
        if requirements.full or (basics.gpus and not requirements.on_cpu):
            orders[Gpus] = {}  # last: the probe reads no other order while nvidia-smi works
        self._ask_all(orders)

    def _visible(self) -> dict[str, str]:
        environment = (*self.requirements.environment, *self.facts.host.env)
        return {name: value for name, value in environment if name in VISIBLE}

    def _ask_basics(self) -> Basics:
        """Ask for what is known at once; note how far the host's clock is ahead of ours."""
        requirements, facts, host = self.requirements, self.facts, self.facts.host
        python, task = host.python or requirements.options.python, requirements.task_needs
        arguments: dict[str, object] = dict(
            workdir=host.workdir or requirements.workdir,
            python=python,
            setup=host.setup_words,
            parts=parts_of(host),
            contained=requirements.image is not None,
            turn=requirements.turn,
            waits=requirements.waits,
            packages=task.imports,
            weights=task.weights,
            cache=task.cache,
            chooses=requirements.chooses,
            own_command=requirements.own_command,
            visible=None if host.devices or requirements.chooses else self._visible(),
            interface=host.interface or "",
        )
        before, began = time.time(), time.monotonic()
        if facts.client is not None:
            try:
                reply = facts.client.call("look", **arguments)
            except HostUnreachable:  # it has waited too long for us, or its connection broke
                facts.client.close()
                facts.client = None
        if facts.client is None:
            assert not isinstance(self.transport, Problem)
            facts.client = RpcClient(self.transport, python, PROBE_SECONDS)
            before, began = time.time(), time.monotonic()
            reply = facts.client.call("look", **arguments)
        basics = facts.replies[Basics] = checked_reply(reply, Basics, host.label)
        # The host read its clock in the middle of the round trip, plus or minus half of it.
        facts.clock_error = (time.monotonic() - began) / 2
        facts.clock_ahead = basics.time - before - facts.clock_error
        return basics

    def lock_and_listen(self, other: str = "") -> tuple[str, int]:
        """Lock the first host, and have it listen; return its address and port, or port 0.

        It is locked first: of two launches at the same time, the first to lock it goes on.

        Its address by which we reach it may be its own alone, as Debian's 127.0.1.1 for its name:
        then that towards the `other` host counts.
        """
        basics, requirements, host = self.facts.basics, self.requirements, self.facts.host
        address = host.address or basics.address or "127.0.0.1"
        if other and not host.address and is_loopback(address):
            address = self._ask(Route, address=other).address or address
        orders: dict[type[Any], dict[str, object]] = {}
        holds = not (requirements.full or requirements.chooses or requirements.is_here)
        if holds and not basics.holder:
            orders[Hold] = {"wanted": self.facts.locks}
        orders[Listen] = {"address": address, "port": requirements.options.port}
        self._ask_all(orders)
        return address, self.facts[Listen].port

    def test_route(self, master: str, port: int, other: str = "") -> None:
        """Test the way to the master.

        The first host finds its device by the way to another one: its own name may be on loopback.
        """
        route = self._ask(Route, address=other or master, master=master, port=port)
        if other:
            self.facts.replies[Route] = structs.replace(route, master=route.address)

    def _ask(self, shape: type[R], **arguments: object) -> R:
        """Send the probe one order; note its reply and return it."""
        self._ask_all({shape: arguments})
        return self.facts[shape]

    def _ask_all(self, orders: Mapping[type[Any], Mapping[str, object]]) -> None:
        client, label = self.facts.client, self.facts.host.label
        assert client is not None
        for shape, arguments in orders.items():  # all at once: one round trip
            client.order(shape.order_name, **arguments)
        for shape in orders:
            self.facts.replies[shape] = checked_reply(client.reply(), shape, label)

    def late(self) -> HostUnreachable:
        """Return the error for a host whose probe does not answer in time."""
        label = self.facts.host.label
        if self.facts.client is None:
            why = "does ~/.bashrc there wait for something, or start another shell?"
            reason = f"its login shell has started no program in time; {why}"
            return HostUnreachable(f"{label}: {reason}")
        return HostUnreachable(f"{label}: does not answer the probe")
