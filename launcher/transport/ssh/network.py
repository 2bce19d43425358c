"""The SSH connections of a launch: hosts to routes, routes to machines."""

from __future__ import annotations

import re
import resource
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fabric import Config, Connection
from paramiko import SSHConfig

from rackrun.errors import Problem, UsageError
from rackrun.launcher.errors import HostUnreachable
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.run.settings import ReachOptions
from rackrun.launcher.transport.parallel import all_or_raise, each
from rackrun.launcher.transport.ssh.connect import close_route, open_gateway, open_route
from rackrun.launcher.transport.ssh.failures import translated
from rackrun.launcher.transport.ssh.host_keys import HostKeys
from rackrun.launcher.transport.ssh.login import PublicKeyLogin
from rackrun.launcher.transport.ssh.machine import Machine
from rackrun.launcher.transport.ssh.openssh import (
    ClientSettings,
    client_settings,
    config_arguments,
)
from rackrun.launcher.transport.ssh.protocol import refuse_unsupported
from rackrun.launcher.transport.ssh.route import ConnectSettings, SshRoute
from rackrun.units import plural

_HOP = re.compile(
    r"(?:ssh://)?(?:(?P<user>.+)@)?(?:\[(?P<address>[^\]]+)\]|(?P<name>[^@:/,]+|[^@/,]*:[^@/,]*:[^@/,]*))"
    r"(?::(?P<port>0*[1-9][0-9]{0,4}))?/?"
)
RESOLVE_SECONDS = 5.0  # the resolver itself waits 10 s and more for a silent name server

_FAMILIES = {"any": socket.AF_UNSPEC, "inet": socket.AF_INET, "inet6": socket.AF_INET6}

# Each connection is an open file, and most shells allow a program 1,024 of them.
_OWN_FILES = 64  # of the launcher, besides its connections
_PER_HOST = 4  # a ProxyCommand has three pipes
_SPARE_FILES = 1024

Target = tuple[str, str | None, int | None]
"""A host or a gateway, as typed: name, user, port."""

Failures = Mapping[int, Problem]
"""The id of a route -> why it cannot be used."""


def open_network(options: ReachOptions, config: str = "") -> Network:
    """Return a network by the ssh_config file of the options, else by this or the usual ones."""
    file = options.ssh_config or config
    return Network(ConnectSettings(Path(file) if file else None, options.accept_new))


class Network:
    """All connections of a launch; hosts behind one gateway share the connection to it."""

    def __init__(self, settings: ConnectSettings) -> None:
        """Take the settings; raises UsageError for an ssh_config file that is not there."""
        self._settings = settings
        self._ssh_arguments = config_arguments(settings.config)
        # Fabric logs in; what it would read of ssh_config and known_hosts, ssh has read.
        login = {"authentication": {"strategy_class": PublicKeyLogin}}
        self._config = Config(overrides=login, ssh_config=SSHConfig(), lazy=True)
        self._looked_up: dict[Target, ClientSettings] = {}
        self._gateways: dict[str, SshRoute | None] = {}
        self._routes: list[SshRoute] = []

    def connect(self, hosts: Sequence[Host]) -> tuple[Machine, ...]:
        """Log in to all hosts at once; one error names all hosts that cannot be reached."""
        return tuple(all_or_raise(self.try_each(hosts)))

    def try_each(self, hosts: Sequence[Host]) -> list[Machine | Problem]:
        """Log in to all hosts at once; return for each the machine, or why it cannot be reached."""
        routes = self.routes_to(hosts)
        # Unknown names are reported before any host is contacted.
        failed = _failures(_resolve, [*self._hops(), *routes], RESOLVE_SECONDS, _not_resolved)
        allow_connections(len(self._routes))
        hops = [gateway for gateway in self._hops() if _failure_of(gateway, failed) is None]
        failed = {**failed, **_failures(open_gateway, hops)}

        def machine(host_and_route: tuple[Host, SshRoute]) -> Machine:
            host, route = host_and_route
            if failure := _failure_of(route, failed):
                raise failure
            with translated(route):
                open_route(route)
            return Machine(host, route)

        return each(machine, list(zip(hosts, routes, strict=True)))

    def routes_to(self, hosts: Sequence[Host]) -> list[SshRoute]:
        """Return the routes to hosts by ssh_config, without contacting any of them."""
        clients = self._clients([(host.name, host.user, host.port) for host in hosts])
        jumps = [client.first("proxyjump") for client in clients]
        self._clients([_hop(hop, jump) for jump in jumps if jump for hop in jump.split(",")])
        routes = [
            self._route(client, host.label) for host, client in zip(hosts, clients, strict=True)
        ]
        self._routes += routes
        return routes

    def _hops(self) -> list[SshRoute]:
        return [gateway for gateway in self._gateways.values() if gateway is not None]

    def close(self) -> None:
        """Close every connection, the gateways last."""
        each(close_route, self._routes)
        for gateway in self._hops():
            close_route(gateway)

    def _clients(self, wanted: Sequence[Target]) -> list[ClientSettings]:
        """Return what ssh would do for hosts and gateways; each is looked up once, all at once."""
        new = [target for target in dict.fromkeys(wanted) if target not in self._looked_up]
        clients = each(lambda target: client_settings(*target, self._ssh_arguments), new)
        self._looked_up.update(zip(new, all_or_raise(clients), strict=True))
        return [self._looked_up[target] for target in wanted]

    def _route(
        self, client: ClientSettings, label: str, through: SshRoute | None = None
    ) -> SshRoute:
        refuse_unsupported(client)
        gateway = through or self._gateway(client)
        connection = Connection(
            client.host,
            user=client.user,
            port=client.port,
            config=self._config,
            gateway=gateway.connection if gateway else "",  # "": none, and Fabric looks for none
            forward_agent=False,
        )
        connection.ssh_config = client  # for PublicKeyLogin
        return SshRoute(
            label=label,
            connection=connection,
            settings=self._settings,
            client=client,
            host_keys=HostKeys(label, client, self._settings.accept_new),
            gateway=gateway,
            family=_FAMILIES[client.first("addressfamily") or "any"],
            command="" if gateway else client.command("ProxyCommand"),
        )

    def _gateway(self, client: ClientSettings) -> SshRoute | None:
        jump = client.first("proxyjump")
        hops = jump.split(",") if jump else []
        through: SshRoute | None = None
        for number, hop in enumerate(hops, start=1):
            target = _hop(hop, jump)
            chain = ",".join(hops[:number])  # hosts with the same first hops share these
            if chain not in self._gateways:
                self._gateways[chain] = None  # while its own ProxyJump is followed: see below
                (client,) = self._clients([target])
                self._gateways[chain] = self._route(client, f"gateway {target[0]}", through)
            through = self._gateways[chain]
            if through is None:
                raise UsageError(f"ProxyJump: {chain}: these gateways form a circle")
        return through


def _hop(hop: str, jump: str) -> Target:
    match = _HOP.fullmatch(hop.strip())
    if match is None:
        raise UsageError(f"ProxyJump {jump}: a gateway is written user@host:22")
    return match["address"] or match["name"], match["user"], int(match["port"] or 0) or None


def _failures(
    work: Callable[[SshRoute], None],
    routes: Sequence[SshRoute],
    seconds: float | None = None,
    late: Callable[[SshRoute], Problem] = lambda route: HostUnreachable(route.label),
) -> Failures:
    outcomes = zip(routes, each(work, routes, seconds, late), strict=True)
    return {id(route): error for route, error in outcomes if error is not None}


def _failure_of(route: SshRoute | None, failed: Failures) -> Problem | None:
    if route is None:
        return None
    return failed.get(id(route)) or _failure_of(route.gateway, failed)


def _resolve(route: SshRoute) -> None:
    # Only names that this machine connects to: gateways and ProxyCommands resolve their own.
    if route.gateway is None and not route.command:
        with translated(route):
            socket.getaddrinfo(route.connection.host, route.connection.port, route.family)


def _not_resolved(route: SshRoute) -> HostUnreachable:
    name = route.connection.host
    return HostUnreachable(
        f"{route.label}: no name server answered for {name} within {RESOLVE_SECONDS:g} s"
    )


def allow_connections(hosts: int) -> None:
    """Raise the soft limit on open files for these hosts; UsageError if it cannot be that high."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed, limit = _OWN_FILES + hosts, _SPARE_FILES + _PER_HOST * hosts
    if hard != resource.RLIM_INFINITY:
        if hard < needed:
            raise UsageError(
                f"{plural(hosts, 'host')}: need {needed} open files, and {hard} are allowed here;"
                f" type `ulimit -n {needed}` as root, or fewer hosts with --include"
            )
        limit = min(limit, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
