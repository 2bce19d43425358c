"""The SSH connections of a launch: hosts to routes, routes to machines."""

from __future__ import annotations

import getpass
import os
import re
import resource
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import paramiko
from fabric import Config, Connection

from rackrun.errors import Problem, UsageError
from rackrun.launcher.errors import HostUnreachable
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.run.settings import ReachOptions
from rackrun.launcher.transport.parallel import all_or_raise, each
from rackrun.launcher.transport.ssh.config import Directives, expanded, file_named, paths
from rackrun.launcher.transport.ssh.connect import close_route, open_gateway, open_route
from rackrun.launcher.transport.ssh.failures import translated
from rackrun.launcher.transport.ssh.host_key_policy import HostKeyPolicy
from rackrun.launcher.transport.ssh.identities import PublicKeyLogin
from rackrun.launcher.transport.ssh.known_hosts import KnownHosts
from rackrun.launcher.transport.ssh.lookup import ClientConfig
from rackrun.launcher.transport.ssh.machine import Machine
from rackrun.launcher.transport.ssh.restrictions import restrictions_of
from rackrun.launcher.transport.ssh.route import ConnectSettings, SshRoute
from rackrun.units import plural

_HOP = re.compile(
    r"(?:ssh://)?(?:(?P<user>.+)@)?(?:\[(?P<address>[^\]]+)\]|(?P<name>[^@:/,]+|[^@/,]*:[^@/,]*:[^@/,]*))"
    r"(?::(?P<port>0*[1-9][0-9]{0,4}))?/?"
)
_LARGEST_PORT = 65535
RESOLVE_SECONDS = 5.0  # the resolver itself waits 10 s and more for a silent name server
USER_CONFIG = Path("~/.ssh/config")
SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
USER_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"

_FAMILIES = {"any": socket.AF_UNSPEC, "inet": socket.AF_INET, "inet6": socket.AF_INET6}
_OVERRIDES = "ConnectTimeout 10\n"  # unused; Fabric reads it, and only as plain seconds
_DEFAULTS = 'Host *\nCanonicalDomains ""\n'  # the parser needs it with CanonicalizeHostname

# Each connection is an open file, and most shells allow a program 1,024 of them.
_OWN_FILES = 64  # of the launcher, besides its connections
_PER_HOST = 4  # a ProxyCommand has three pipes
_SPARE_FILES = 1024

Failures = Mapping[int, Problem]
"""By the id of a route."""


def open_network(options: ReachOptions, config: str = "") -> Network:
    """Return a network by the ssh_config file of the options, else by this or the usual ones."""
    file = options.ssh_config or config
    return Network(ConnectSettings(Path(file) if file else None, options.accept_new))


class Network:
    """All connections of a launch; hosts behind one gateway share the connection to it."""

    def __init__(self, settings: ConnectSettings) -> None:
        """Read the ssh_config files; raises UsageError for invalid ones."""
        self._settings = settings
        self._directives = Directives(_config_text(settings.config))
        self._configs: dict[str, Config] = {}
        self._gateways: dict[str, SshRoute | None] = {}
        self._known_hosts_of: dict[tuple[str, ...], KnownHosts] = {}
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
        routes = [self._route(host.name, host.user, host.port, host.label) for host in hosts]
        self._routes += routes
        return routes

    def _hops(self) -> list[SshRoute]:
        return [gateway for gateway in self._gateways.values() if gateway is not None]

    def settings(
        self, name: str, user: str | None = None, port: int | None = None
    ) -> dict[str, Any]:
        """Return ssh_config's settings for a host: option in lower case -> value."""
        try:
            return dict(self._config(name, user, port).base_ssh_config.lookup(name))
        except paramiko.SSHException as error:
            raise UsageError(f"ssh_config, for {name}: {error}") from None

    def close(self) -> None:
        """Close every connection, the gateways last."""
        each(close_route, self._routes)
        for gateway in self._hops():
            close_route(gateway)

    def _route(
        self,
        name: str,
        user: str | None,
        port: int | None,
        label: str,
        through: SshRoute | None = None,
    ) -> SshRoute:
        config = self._config(name, user, port)
        settings = self.settings(name, user, port)
        gateway = through or self._gateway(name, settings)
        connection = Connection(
            name,
            user=user,
            port=port,
            config=config,
            gateway=gateway.connection if gateway else "",  # "": none, and Fabric looks for none
            forward_agent=False,
        )
        strict = settings.get("stricthostkeychecking", "ask")
        alias = settings.get("hostkeyalias")
        tokens = _tokens(name, connection, settings)
        for option in ("certificatefile", "identityagent"):  # paramiko fills in no tokens there
            value = settings.get(option, "none")
            if value.lower() not in ("none", "ssh_auth_sock"):
                connection.ssh_config[option] = str(file_named(option, value, tokens))
        user_setting = settings.get("userknownhostsfile", USER_KNOWN_HOSTS)
        user_files = paths("UserKnownHostsFile", user_setting, tokens)
        # ssh takes no tokens in this one
        system_setting = settings.get("globalknownhostsfile", SYSTEM_KNOWN_HOSTS)
        system_files = paths("GlobalKnownHostsFile", system_setting, {})
        files = tuple(map(str, user_files + system_files))
        if files not in self._known_hosts_of:  # hosts of a launch usually share them
            self._known_hosts_of[files] = KnownHosts(user_files + system_files)
        route = SshRoute(
            label=label,
            connection=connection,
            settings=self._settings,
            restrictions=restrictions_of(name, settings),
            known_hosts=self._known_hosts_of[files],
            key_name=alias or connection.host,
            key_port=22 if alias else connection.port,
            record_in=user_files[0],
            accept_new=self._settings.accept_new or strict in ("accept-new", "no", "off"),
            hash_names=settings.get("hashknownhosts") == "yes",
            gateway=gateway,
            family=_FAMILIES[settings.get("addressfamily", "any")],
            command="" if gateway else settings.get("proxycommand") or "",
        )
        connection.client.set_missing_host_key_policy(HostKeyPolicy(route))
        return route

    def _gateway(self, name: str, settings: dict[str, Any]) -> SshRoute | None:
        jump = settings.get("proxyjump", "none")
        hops = [] if jump.lower() == "none" else jump.split(",")
        through: SshRoute | None = None
        for number, hop in enumerate(hops, start=1):
            user, hop_name, port = _hop(hop, jump)
            if hop_name in (name, settings["hostname"]):
                return None  # the gateway itself, where `Host *` names it for all
            chain = ",".join(hops[:number])  # hosts with the same first hops share these
            if chain not in self._gateways:
                self._gateways[chain] = None  # while its own ProxyJump is followed: see below
                hop_route = self._route(hop_name, user, port, f"gateway {hop_name}", through)
                self._gateways[chain] = hop_route
            through = self._gateways[chain]
            if through is None:
                raise UsageError(f"ProxyJump: {chain}: these gateways form a circle")
        return through

    def _config(self, name: str, user: str | None, port: int | None) -> Config:
        # The first value of an option counts: user and port of hosts.txt override ssh_config.
        given = (f"User {user}\n" if user else "") + (f"Port {port}\n" if port else "")
        text = f"{given}{_OVERRIDES}Host *\n{self._directives.about(name)}{_DEFAULTS}"
        if text not in self._configs:
            try:
                ssh_config = ClientConfig.from_text(text)
            except paramiko.ConfigParseError as error:
                raise UsageError(f"ssh_config: {error}") from None
            login = {"authentication": {"strategy_class": PublicKeyLogin}}
            self._configs[text] = Config(overrides=login, ssh_config=ssh_config, lazy=True)
        return self._configs[text]


def _config_text(file: Path | None) -> str:
    if file is not None and not file.is_file():
        raise UsageError(f"{file}: there is no such ssh_config file")
    user = USER_CONFIG.expanduser()
    if file is not None:
        return expanded(file, user.parent)
    user_text = expanded(user, user.parent, guarded=True)
    return f"{user_text}Host *\n{expanded(SYSTEM_CONFIG, SYSTEM_CONFIG.parent)}"


def _hop(hop: str, jump: str) -> tuple[str | None, str, int | None]:
    match = _HOP.fullmatch(hop.strip())
    port = int(match["port"] or 0) if match else 0
    if match is None or port > _LARGEST_PORT:
        raise UsageError(f"ProxyJump {jump}: a gateway is written user@host:22")
    return match["user"], match["address"] or match["name"], port or None


def _tokens(name: str, connection: Connection, settings: Mapping[str, Any]) -> dict[str, str]:
    ours = socket.gethostname()
    return {  # TOKENS in ssh_config(5)
        "%": "%",
        "d": str(Path.home()),
        "h": connection.host,
        "i": str(os.getuid()),
        "k": settings.get("hostkeyalias") or connection.host,
        "L": ours.partition(".")[0],
        "l": ours,
        "n": name,
        "p": str(connection.port),
        "r": connection.user,
        "u": getpass.getuser(),
    }


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
