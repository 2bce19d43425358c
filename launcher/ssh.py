"""Hosts behind SSH as places to start programs: the only file that knows Fabric and paramiko.

    hosts -> routes (ssh_config, gateways, known keys) -> connections, all at once -> machines

Fabric resolves the configuration and logs in. What it leaves to chance is settled here: host keys
are held against known_hosts before anything is sent, every step has a time limit, a gateway is
one connection however many hosts are behind it, and programs talk over plain channels.
"""

import base64
import contextlib
import logging
import os
import random
import shlex
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import paramiko
from fabric import Config, Connection
from paramiko.agent import AgentSSH
from paramiko.auth_strategy import (
    AuthFailure,
    AuthSource,
    AuthStrategy,
    InMemoryPrivateKey,
    SourceResult,
)
from paramiko.pkey import UnknownKeyType
from paramiko.ssh_exception import ChannelException, IncompatiblePeer

from launcher.errors import AccessRefused, HostLost, HostUnreachable, LauncherError, UsageError
from launcher.hostkeys import (
    CERTIFICATE,
    Certificate,
    KnownHosts,
    Opinion,
    certificate_of,
    fingerprint,
    known_hosts_line,
    record,
)
from launcher.hosts import Host
from launcher.parallel import all_or_raise, each
from launcher.sshconfig import Settings, expanded

KEEPALIVE_SECONDS = 5
UNACKNOWLEDGED_SECONDS = 15
IDLE_SECONDS = 1.0  # paramiko wakes ten times as often, for each host, to see whether to end
READ_BYTES = 256 * 1024
COMPLAINT_BYTES = 4096
WAKE_SECONDS = 5.0
RESOLVE_SECONDS = 5.0  # where a name server is silent, the resolver itself waits for 10 and more
SEND_SECONDS = 1.0
RETRY_SECONDS = 1.0
PROXY_SECONDS = 0.5  # for a ProxyCommand to end, once it closed its end of the connection

USER_CONFIG = Path("~/.ssh/config")
SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
USER_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
DEFAULT_KEYS = ("~/.ssh/id_rsa", "~/.ssh/id_ecdsa", "~/.ssh/id_ed25519")

WEAK = {  # still offered by paramiko: CBC, 3DES, MD5 and SHA-1
    "ciphers": ["aes128-cbc", "aes192-cbc", "aes256-cbc", "3des-cbc"],
    "macs": ["hmac-sha1", "hmac-md5", "hmac-sha1-96", "hmac-md5-96"],
}

BROKEN = (paramiko.SSHException, EOFError, OSError)
"""What paramiko raises when a connection is of no use any more."""

logging.getLogger("paramiko").addHandler(logging.NullHandler())  # we say it ourselves, once


@dataclass(frozen=True)
class Access:
    """How to get in."""

    config: Path | None = None
    """An ssh_config file to use in place of the user's and the system's."""

    accept_new: bool = False
    """Record the keys of hosts that are in no known_hosts file; changed keys are refused still."""

    connect_seconds: float = 10.0
    banner_seconds: float = 15.0
    handshake_seconds: float = 20.0
    """From the connection to keys for it, the banner included."""
    login_seconds: float = 30.0
    """For all our keys together."""
    channel_seconds: float = 10.0

    def again(self) -> "Access":
        """For a host that was reached before and fell silent: somebody waits for the end."""
        return replace(
            self,
            connect_seconds=4.0,
            banner_seconds=3.0,
            handshake_seconds=4.0,
            login_seconds=4.0,
            channel_seconds=1.0,
        )


@dataclass(frozen=True)
class Proxy:
    """A ProxyCommand that was started."""

    process: "subprocess.Popen[bytes]"
    complaints: IO[bytes]

    def end(self) -> None:
        """End it, if it still runs."""
        self.process.terminate()
        self.process.wait()
        self.complaints.close()

    def last_words(self) -> str:
        """How it ended, and the last line of its standard error; empty while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(PROXY_SECONDS)
            self.complaints.seek(max(0, self.complaints.seek(0, os.SEEK_END) - COMPLAINT_BYTES))
            said = self.complaints.read().decode(errors="replace").split("\n")
            words = [line.strip() for line in said if line.strip()]
            return f"ended with {code}: {words[-1]}" if words else f"ended with {code}"
        return ""


@dataclass(frozen=True)
class Route:
    """A host as ssh_config has it, not yet connected."""

    label: str
    connection: Connection
    access: Access
    known: KnownHosts
    key_name: str
    key_port: int
    record_in: Path
    accept_new: bool
    hash_names: bool
    gateway: "Route | None"
    family: int
    """ssh_config's AddressFamily, as sockets have it."""
    command: str
    """ssh_config's ProxyCommand, or nothing."""
    proxies: list[Proxy] = field(default_factory=list)
    """The ProxyCommands that were started."""
    opening: threading.Lock = field(default_factory=threading.Lock)
    """Held while a gateway is opened: the hosts behind it come for it all at once."""

    @property
    def target(self) -> str:
        """Where the route leads, for messages."""
        return f"{self.connection.host} port {self.connection.port}"


Failures = Mapping[int, LauncherError]
"""By the id of a route."""


class Network:
    """All connections of a launch; hosts behind one gateway share the connection to it."""

    def __init__(self, access: Access) -> None:
        """Read the ssh_config files; raises UsageError when they make no sense."""
        self._access = access
        self._written = Settings(_config_text(access.config))
        self._configs: dict[str, Config] = {}
        self._gateways: dict[str, Route | None] = {}
        self._known: dict[tuple[str, ...], KnownHosts] = {}
        self._routes: list[Route] = []

    def connect(self, hosts: Sequence[Host]) -> tuple["Machine", ...]:
        """Log in to every host at once; one error names all hosts that cannot be reached.

        No host is contacted while the name of one of them is unknown.
        """
        routes = self._routes_to(hosts)
        unknown = self._look_up(routes)
        all_or_raise(unknown.values())
        return tuple(all_or_raise(self._log_in(hosts, routes, unknown)))

    def try_each(self, hosts: Sequence[Host]) -> list["Machine | LauncherError"]:
        """Log in to every host at once; for each a machine, or why there is none."""
        routes = self._routes_to(hosts)
        return self._log_in(hosts, routes, self._look_up(routes))

    def _routes_to(self, hosts: Sequence[Host]) -> list[Route]:
        routes = [self._route(host.name, host.user, host.port, host.label) for host in hosts]
        self._routes += routes
        return routes

    def _look_up(self, routes: Sequence[Route]) -> Failures:
        """Look the names of all hosts and gateways up."""
        look_up = partial(_said_plainly, _resolve)
        return _failures(look_up, [*self._hops(), *routes], RESOLVE_SECONDS, _not_resolved)

    def _log_in(
        self, hosts: Sequence[Host], routes: Sequence[Route], failed: Failures
    ) -> list["Machine | LauncherError"]:
        """Open the gateways, then the hosts; what failed, or is behind that, is not tried."""
        hops = [gateway for gateway in self._hops() if _trouble(gateway, failed) is None]
        failed = {**failed, **_failures(_open_gateway, hops)}

        def machine(host_and_route: tuple[Host, Route]) -> "Machine":
            host, route = host_and_route
            if trouble := _trouble(route, failed):
                raise trouble
            _said_plainly(_open, route)
            return Machine(host, route)

        return each(machine, list(zip(hosts, routes, strict=True)))

    def _hops(self) -> list[Route]:
        return [gateway for gateway in self._gateways.values() if gateway is not None]

    def settings(
        self, name: str, user: str | None = None, port: int | None = None
    ) -> dict[str, Any]:
        """What ssh_config says about a host: option in lower case -> value."""
        try:
            return dict(self._config(name, user, port).base_ssh_config.lookup(name))
        except paramiko.SSHException as error:
            raise UsageError(f"ssh_config, for {name}: {error}") from None

    def close(self) -> None:
        """Close every connection, the gateways last."""
        each(_close, self._routes)
        for gateway in self._hops():
            _close(gateway)

    def _route(
        self,
        name: str,
        user: str | None,
        port: int | None,
        label: str,
        through: Route | None = None,
    ) -> Route:
        config = self._config(name, user, port)
        settings = self.settings(name, user, port)
        gateway = through or self._gateway(name, settings)
        connection = Connection(
            name,
            user=user,
            port=port,
            config=config,
            gateway=gateway.connection if gateway else "",  # "": none, and do not look for one
            forward_agent=False,
        )
        strict = settings.get("stricthostkeychecking", "ask")
        alias = settings.get("hostkeyalias")
        user_files = settings.get("userknownhostsfile", USER_KNOWN_HOSTS)
        route = Route(
            label=label,
            connection=connection,
            access=self._access,
            known=self._known_hosts(user_files, settings.get("globalknownhostsfile")),
            key_name=alias or connection.host,
            key_port=22 if alias else connection.port,
            record_in=_paths(user_files)[0],
            accept_new=self._access.accept_new or strict in ("accept-new", "no", "off"),
            hash_names=settings.get("hashknownhosts") == "yes",
            gateway=gateway,
            family=_family(settings.get("addressfamily", "any")),
            command="" if gateway else settings.get("proxycommand") or "",
        )
        connection.client.set_missing_host_key_policy(HostKeyLaw(route))
        return route

    def _gateway(self, name: str, settings: dict[str, Any]) -> Route | None:
        """The last hop of a host's ProxyJump, made once for all hosts that go through it."""
        jump = settings.get("proxyjump", "none")
        hops = [] if jump.lower() == "none" else jump.split(",")
        through: Route | None = None
        for number, hop in enumerate(hops, start=1):
            user, _, rest = hop.strip().removeprefix("ssh://").rpartition("@")
            hop_name, port = _name_and_port(rest)
            if hop_name in (name, settings["hostname"]):
                return None  # the gateway itself, where `Host *` names it for all
            chain = ",".join(hops[:number])
            if chain not in self._gateways:
                self._gateways[chain] = None
                hop_route = self._route(
                    hop_name, user or None, port, f"gateway {hop_name}", through
                )
                self._gateways[chain] = hop_route
            through = self._gateways[chain]
            if through is None:
                raise UsageError(f"ProxyJump: {chain}: these gateways go in a circle")
        return through

    def _config(self, name: str, user: str | None, port: int | None) -> Config:
        """What ssh_config says under a user and port of hosts.txt, which come first as with ssh."""
        given = f"User {user}\n" * bool(user) + f"Port {port}\n" * bool(port)
        text = f"{given}Host *\n{self._written.about(name)}"
        if text not in self._configs:
            self._configs[text] = _fabric_config(text)
        return self._configs[text]

    def _known_hosts(self, user_files: str, system_files: str | None) -> KnownHosts:
        files = _paths(user_files) + _paths(system_files or SYSTEM_KNOWN_HOSTS)
        key = tuple(map(str, files))
        if key not in self._known:
            self._known[key] = KnownHosts(files)
        return self._known[key]


class Machine:
    """A host we are logged in to: a place to start programs at."""

    def __init__(self, host: Host, route: Route) -> None:
        """Hold on to an open connection."""
        self.host = host
        self._route = route
        self._hurried = replace(route, access=route.access.again())
        self._used = False

    @property
    def name(self) -> str:
        """The host's label."""
        return self.host.label

    @property
    def address(self) -> str:
        """The address that we are connected to; empty behind a gateway or a ProxyCommand."""
        sock = self._route.connection.transport.sock
        if isinstance(sock, socket.socket) and sock.family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):  # it just broke: who opens something there says so
                return str(sock.getpeername()[0])
        return ""

    def open(self, argv: Sequence[str]) -> "Stream":
        """Start a program, over a new connection if this one broke; raises what then goes wrong.

        So whoever looks after a lost host gets through, when only its connection was lost.
        """
        first, self._used = not self._used, True
        try:
            return self._start(argv, self._route if first else self._hurried)
        except BROKEN as error:
            if first and self._route.connection.is_connected:
                raise HostUnreachable(f"{self.name}: {_shut(self._route, error)}") from error
        self.close()
        _said_plainly(_open, self._hurried)
        try:
            return self._start(argv, self._hurried)
        except BROKEN as error:
            raise HostLost(f"{self.name}: {_shut(self._hurried, error)}") from error

    def _start(self, argv: Sequence[str], route: Route) -> "Stream":
        seconds = route.access.channel_seconds
        channel = route.connection.transport.open_session(timeout=seconds)
        channel.settimeout(WAKE_SECONDS)
        _execute(channel, shlex.join(argv), seconds)
        return Stream(self.name, channel)

    def close(self) -> None:
        """Close the connection, and with it every program's channel."""
        _hang_up(self._route)


class Stream:
    """The channel of a program that runs on a host: standard input, output and error."""

    def __init__(self, name: str, channel: paramiko.Channel) -> None:
        """Wrap a channel on which a command was started."""
        self._name = name
        self._channel = channel
        self._errors = b""

    def send(self, data: bytes) -> None:
        """Write all of `data`; raises HostLost when there is no room for a second."""
        deadline = time.monotonic() + SEND_SECONDS
        while data:
            if self._channel.closed or time.monotonic() > deadline:
                raise HostLost(f"{self._name}: the connection takes no more data")
            if not self._channel.send_ready():
                time.sleep(0.01)
                continue
            try:
                data = data[self._channel.send(data) :]
            except OSError as error:
                raise HostLost(f"{self._name}: the connection broke: {_words(error)}") from error

    def receive(self) -> bytes:
        """Wait for output; b"" at the end, whether the program ended or the link broke."""
        while True:
            try:
                data = self._channel.recv(READ_BYTES)
            except TimeoutError:
                data = b""
                if not self._channel.closed:
                    self._drain_errors()
                    continue
            self._drain_errors()
            return data

    def complaint(self) -> str:
        """The end of its standard error, and what became of the connection."""
        self._drain_errors()
        said = self._errors.decode(errors="replace").strip()
        broke = self._channel.get_transport().get_exception()
        alive = self._channel.get_transport().is_active()
        link = "" if alive else f"the connection broke ({_words(broke) if broke else 'closed'})"
        return "\n".join(filter(None, (said, link)))

    def close(self) -> None:
        """Close both directions."""
        self._channel.close()

    def _drain_errors(self) -> None:
        while self._channel.recv_stderr_ready():
            self._errors = (self._errors + self._channel.recv_stderr(READ_BYTES))[-COMPLAINT_BYTES:]


def _execute(channel: paramiko.Channel, command: str, seconds: float) -> None:
    """Ask for a command to be run; by itself, paramiko waits for the answer for ever."""
    late = threading.Event()

    def give_up() -> None:
        late.set()
        channel.close()

    watch = threading.Timer(seconds, give_up)
    watch.start()
    try:
        channel.exec_command(command)
    except paramiko.SSHException as error:
        raise (TimeoutError() if late.is_set() else error) from None
    finally:
        watch.cancel()


def _config_text(file: Path | None) -> str:
    if file is not None and not file.is_file():
        raise UsageError(f"{file}: there is no such ssh_config file")
    user = USER_CONFIG.expanduser()
    if file is not None:
        return expanded(file, user.parent)
    return f"{expanded(user, user.parent)}Host *\n{expanded(SYSTEM_CONFIG, SYSTEM_CONFIG.parent)}"


def _fabric_config(text: str) -> Config:
    try:
        ssh_config = paramiko.SSHConfig.from_text(text)
    except paramiko.ConfigParseError as error:
        raise UsageError(f"ssh_config: {error}") from None
    login = {"authentication": {"strategy_class": Keys}}
    return Config(overrides=login, ssh_config=ssh_config, lazy=True)


def _name_and_port(text: str) -> tuple[str, int | None]:
    """`host`, `host:port`, `[address]:port` of a ProxyJump."""
    name, colon, port = text.rpartition(":")
    if text.startswith("["):
        address, _, rest = text[1:].partition("]")
        return address, int(rest[1:]) if rest[1:].isdecimal() else None
    if not colon or ":" in name:
        return text, None
    if not port.isdecimal():
        raise UsageError(f"ProxyJump: {text}: a port is written host:22")
    return name, int(port)


def _family(word: str) -> int:
    """What ssh_config's AddressFamily means."""
    families = {"any": socket.AF_UNSPEC, "inet": socket.AF_INET, "inet6": socket.AF_INET6}
    if word.lower() not in families:
        raise UsageError(f"ssh_config: AddressFamily {word}: there are: {', '.join(families)}")
    return families[word.lower()]


def _paths(words: str) -> list[Path]:
    return [Path(word).expanduser() for word in shlex.split(words)]


def _failures(
    work: Callable[[Route], None],
    routes: Sequence[Route],
    seconds: float | None = None,
    late: Callable[[Route], LauncherError] = lambda route: HostUnreachable(route.label),
) -> Failures:
    """Do the work for all routes at once; what went wrong."""
    outcomes = zip(routes, each(work, routes, seconds, late), strict=True)
    return {id(route): error for route, error in outcomes if error is not None}


def _trouble(route: Route | None, failed: Failures) -> LauncherError | None:
    """What failed on a route, or on the way there."""
    if route is None:
        return None
    return failed.get(id(route)) or _trouble(route.gateway, failed)


def _open_gateway(gateway: Route) -> None:
    """Open a gateway that is not open, or not any more; hosts behind it find it open."""
    with gateway.opening:
        if not gateway.connection.is_connected:
            _said_plainly(_open, gateway)


def _open(route: Route) -> None:
    """Connect and log in; a reset or a refusal gets one more try, as sshd drops at random."""
    try:
        _log_in(route)
        return
    except (ConnectionError, EOFError, paramiko.SSHException) as error:
        if not _was_dropped(error):
            raise
    time.sleep(RETRY_SECONDS * random.uniform(0.5, 1.5))
    _log_in(route)


def _was_dropped(error: BaseException) -> bool:
    """A reset or an end of stream, be it behind paramiko's "Error reading SSH protocol banner"."""
    dropped = (ConnectionError, EOFError)
    return isinstance(error, dropped) or isinstance(error.__context__, dropped)


def _log_in(route: Route) -> None:
    connection, access = route.connection, route.access
    if route.gateway is not None:  # Fabric would open it with the socket of the first time
        _open_gateway(replace(route.gateway, access=access))
    connection.connect_timeout = access.handshake_seconds  # to Fabric, our socket being connected
    connection.connect_kwargs = {
        "banner_timeout": access.banner_seconds,
        "auth_timeout": access.login_seconds,
        "channel_timeout": access.channel_seconds,
        "disabled_algorithms": WEAK,
        "transport_factory": partial(_transport, route),
    }
    if route.command:
        connection.connect_kwargs["sock"] = _through_command(route)
    elif route.gateway is None:
        connection.connect_kwargs["sock"] = _dial(route)
    try:
        connection.open()
    finally:
        if not connection.is_connected:
            connection.client.close()
    connection.transport.set_keepalive(KEEPALIVE_SECONDS)
    connection.transport.sock.settimeout(IDLE_SECONDS)


def _dial(route: Route) -> socket.socket:
    sock = _connected(route)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_SECONDS * 1000)
    return sock


def _connected(route: Route) -> socket.socket:
    """A connection to the first of the host's addresses that takes one."""
    address, seconds = (route.connection.host, route.connection.port), route.access.connect_seconds
    if route.family == socket.AF_UNSPEC:
        return socket.create_connection(address, timeout=seconds)
    found = socket.getaddrinfo(*address, route.family, socket.SOCK_STREAM)
    *others, last = [(str(where[0]), address[1]) for *_, where in found]
    for other in others:
        with contextlib.suppress(OSError):
            return socket.create_connection(other, timeout=seconds)
    return socket.create_connection(last, timeout=seconds)


def _through_command(route: Route) -> socket.socket:
    """A socket whose other end is the standard input and output of ssh_config's ProxyCommand."""
    ours, theirs = socket.socketpair()
    complaints = tempfile.TemporaryFile()  # noqa: SIM115 - it ends with the network
    with theirs:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {route.command}"],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=complaints,
            start_new_session=True,  # Ctrl-C is for the launcher, which has things to say there
        )
    route.proxies.append(Proxy(process, complaints))
    return ours


class _Transport(paramiko.Transport):
    """Asks for a certificate first where an authority may vouch for the host, else for none."""

    certified = False

    @property
    def preferred_keys(self) -> tuple[str, ...]:
        plain = tuple(self._filter_algorithm("keys"))  # type: ignore[attr-defined]
        return tuple(f"{name}{CERTIFICATE}" for name in plain * self.certified) + plain


def _transport(
    route: Route, sock: Any, disabled_algorithms: dict[str, list[str]]
) -> paramiko.Transport:
    """A transport that asks for a key of a known type first, so that known hosts are recognised."""
    transport = _Transport(sock, disabled_algorithms=disabled_algorithms)
    transport.handshake_timeout = 2 * route.access.handshake_seconds  # never: Fabric's is first
    transport.certified = bool(route.known.authorities(route.key_name, route.key_port))
    types = route.known.types(route.key_name, route.key_port)
    security = transport.get_security_options()
    rsa = ["rsa-sha2-512", "rsa-sha2-256"]
    wanted = [name for kind in types for name in (rsa if kind == "ssh-rsa" else [kind])]
    offered = list(security.key_types)
    first = [name for name in wanted if name in offered]
    security.key_types = first + [name for name in offered if name not in first]
    return transport


class HostKeyLaw(paramiko.MissingHostKeyPolicy):
    """Asked at every connection, before anything is sent: paramiko itself is given no keys."""

    def __init__(self, route: Route) -> None:
        """Judge the key of one route."""
        self._route = route

    def missing_host_key(
        self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey
    ) -> None:
        """Return when the key is known or may be recorded; raise AccessRefused otherwise."""
        route, blob = self._route, key.asbytes()
        name, port, kind = route.key_name, route.key_port, key.get_name()
        opinion = self._judge(key)
        if opinion.verdict == "unknown" and route.accept_new:
            line = known_hosts_line(name, port, kind, blob, route.hash_names)
            try:
                record(route.record_in, line)
            except OSError as error:
                reason = f"cannot be recorded in {route.record_in}: {error.strerror}"
                raise AccessRefused(f"{route.label}: its host key {reason}") from error
        elif opinion.verdict == "unknown":
            raise AccessRefused(_unknown_key(route, known_hosts_line(name, port, kind, blob), key))
        elif opinion.verdict != "known":
            raise AccessRefused(_wrong_key(route, opinion, key))

    def _judge(self, key: paramiko.PKey) -> Opinion:
        """A certificate speaks for its key, unless one of the two keys is revoked."""
        known, name, port = self._route.known, self._route.key_name, self._route.key_port
        opinion = known.judge(name, port, key.asbytes())
        shown = certificate_of(key.public_blob.key_blob) if key.public_blob else None
        if shown is None or opinion.verdict == "revoked":
            return opinion
        authority = known.judge(name, port, shown.authority)
        if authority.verdict == "revoked":
            return authority
        if known.vouched(name, port, shown, time.time()) and is_signed(shown):
            return Opinion("known")
        return opinion


def is_signed(certificate: Certificate) -> bool:
    """Whether the authority of a certificate has signed it; the host may have sent anything."""
    signature = paramiko.Message(certificate.signature)
    try:
        kind = paramiko.Message(certificate.authority).get_text()
        authority = paramiko.PKey.from_type_string(kind, certificate.authority)
        return bool(authority.verify_ssh_sig(certificate.signed, signature))
    except (UnknownKeyType, paramiko.SSHException, ValueError):
        return False


def _unknown_key(route: Route, line: str, key: paramiko.PKey) -> str:
    return (
        f"{route.label}: the host key of {route.target} is not known\n"
        f"    shown    {fingerprint(key.asbytes())} ({key.get_name()})\n"
        f"    compare it on that host with: ssh-keygen -lf {_key_file(key.get_name())}\n"
        f"    then type: echo {shlex.quote(line)} >> {shlex.quote(str(route.record_in))}\n"
        f"    or, to trust every new host at first sight, add --accept-new"
    )


def _wrong_key(route: Route, opinion: Opinion, key: paramiko.PKey) -> str:
    known = opinion.lines[0]
    entry = known_hosts_line(route.key_name, route.key_port, "", b"").split()[0]
    if opinion.verdict == "revoked":
        return (
            f"{route.label}: the host key of {route.target} is revoked\n"
            f"    shown    {fingerprint(key.asbytes())} ({key.get_name()})\n"
            f"    revoked  {known.file}:{known.line}; give the host a new key"
        )
    return (
        f"{route.label}: the host key of {route.target} has CHANGED: a new machine, or somebody"
        " in between\n"
        f"    known    {fingerprint(known.blob)} ({known.type}, {known.file}:{known.line})\n"
        f"    shown    {fingerprint(key.asbytes())} ({key.get_name()})\n"
        f"    compare it on that host with: ssh-keygen -lf {_key_file(key.get_name())}\n"
        f"    then type: ssh-keygen -f {shlex.quote(str(known.file))} -R {shlex.quote(entry)}"
    )


def _key_file(key_type: str) -> str:
    family = key_type.removeprefix("ssh-").partition("-")[0]
    return f"/etc/ssh/ssh_host_{family}_key.pub"


class Keys(AuthStrategy):
    """The keys to log in with: the agent's and those in files, each tried once, never a prompt.

    As with ssh: IdentityFile names files, the usual ones otherwise; with IdentitiesOnly the
    agent serves only keys that are named; keys that the agent holds are not read from files.
    """

    def __init__(self, ssh_config: dict[str, Any], fabric_config: Config, username: str) -> None:
        """Take what Fabric resolved for this host."""
        super().__init__(ssh_config=fabric_config.base_ssh_config)
        self._settings = ssh_config
        self._username = username
        self.locked: list[Path] = []
        self.tried = 0

    def authenticate(self, transport: paramiko.Transport) -> list[SourceResult]:
        """Try one key after the other; the transport's time for one is that for all of them."""
        self._transport = transport
        self._deadline = time.monotonic() + transport.auth_timeout
        return super().authenticate(transport)

    def get_sources(self) -> Iterator[AuthSource]:
        """The agent's keys that are named, its other keys, then the files."""
        names = self._settings.get("identityfile", DEFAULT_KEYS)
        files = {Path(name).expanduser(): _public_blob(Path(name).expanduser()) for name in names}
        agent = _KeyAgent(self._settings.get("identityagent", "SSH_AUTH_SOCK"))
        held = {key.asbytes(): key for key in agent.get_keys()}
        only_named = self._settings.get("identitiesonly", "no") == "yes"
        named = [blob for blob in files.values() if blob in held]
        others = [] if only_named else [blob for blob in held if blob not in named]
        try:
            for blob in dict.fromkeys([*named, *others]):
                yield from self._attempts(held[blob])
            for file, blob in files.items():
                if blob not in held and (key := self._load(file)) is not None:
                    yield from self._attempts(key)
        finally:
            agent.close()

    def _attempts(self, key: paramiko.PKey) -> Iterator[AuthSource]:
        """With the certificate of ssh_config's CertificateFile if it is this key's, and without."""
        file = Path(self._settings.get("certificatefile", "none")).expanduser()
        shown = certificate_of(_public_blob(file))
        if shown is not None and shown.key == key.asbytes():
            own = key.public_blob
            key.load_certificate(str(file))
            yield self._attempt(key)
            key.public_blob = own  # the next one is asked for when this one was refused
        yield self._attempt(key)

    def _attempt(self, key: paramiko.PKey) -> AuthSource:
        self.tried += 1
        self._transport.auth_timeout = max(0.0, self._deadline - time.monotonic())
        return InMemoryPrivateKey(self._username, key)

    def _load(self, file: Path) -> paramiko.PKey | None:
        """The key of a file; None when there is none, or one that needs a passphrase."""
        try:
            return paramiko.PKey.from_path(file)
        except TypeError:
            self.locked.append(file)
        except (OSError, ValueError, UnknownKeyType):
            pass  # no such file, or a public key whose other half only an agent could have
        return None


class _KeyAgent(AgentSSH):
    """The ssh-agent that ssh_config's IdentityAgent names; without one it holds no keys."""

    def __init__(self, identity_agent: str) -> None:
        super().__init__()
        named = os.environ.get("SSH_AUTH_SOCK", "none")
        path = named if identity_agent == "SSH_AUTH_SOCK" else identity_agent
        if path == "none":
            return
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(str(Path(path).expanduser()))
        except OSError:
            sock.close()
        else:
            self._connect(sock)  # type: ignore[attr-defined]

    def close(self) -> None:
        self._close()  # type: ignore[attr-defined]


def _public_blob(file: Path) -> bytes:
    """The public half of a key file, from the .pub beside it; empty when that does not tell."""
    public = file if file.suffix == ".pub" else file.with_name(f"{file.name}.pub")
    try:
        return base64.b64decode(public.read_text().split()[1], validate=True)
    except (OSError, IndexError, ValueError):
        return b""


def _resolve(route: Route) -> None:
    if route.gateway is None and not route.command:
        socket.getaddrinfo(route.connection.host, route.connection.port, route.family)


def _not_resolved(route: Route) -> HostUnreachable:
    name = route.connection.host
    return HostUnreachable(
        f"{route.label}: no name server says within {RESOLVE_SECONDS:g} s where {name} is"
    )


def _hang_up(route: Route) -> None:
    """Close a connection; its thread is woken, or it would see that only when it is idle."""
    transport = route.connection.transport
    with contextlib.suppress(paramiko.SSHException, EOFError, OSError):  # it broke before
        if transport is not None and isinstance(transport.sock, socket.socket):
            transport.sock.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
        route.connection.close()


def _close(route: Route) -> None:
    _hang_up(route)
    for proxy in route.proxies:
        proxy.end()


def _said_plainly(work: Callable[[Route], None], route: Route) -> None:
    """Do the work; what goes wrong is raised as an error of ours that names the host."""
    try:
        work(route)
    except (AuthFailure, paramiko.AuthenticationException) as error:
        if _no_verdict(error):
            raise HostUnreachable(f"{route.label}: {_login_stalled(route)}") from error
        raise AccessRefused(f"{route.label}: {_login_refused(route, error)}") from error
    except IncompatiblePeer as error:
        raise AccessRefused(
            f"{route.label}: {route.target} offers no safe algorithm: {error}"
        ) from error
    except (paramiko.SSHException, OSError, EOFError) as error:
        raise HostUnreachable(f"{route.label}: {_unreachable(route, error)}") from error


def _unreachable(route: Route, error: BaseException) -> str:
    if isinstance(error, socket.gaierror):
        return f"there is no host named {route.connection.host} ({error.strerror})"
    if route.proxies and (ended := route.proxies[-1].last_words()):
        return f"its ProxyCommand ({route.command}) {ended}"
    if isinstance(error, ChannelException) and route.gateway is not None:
        return f"{route.gateway.label} cannot reach {route.target}: {error.text}"
    if "opening channel" in str(error) and route.gateway is not None:
        seconds = route.access.channel_seconds
        return f"{route.gateway.label} does not reach {route.target} within {seconds:g} s"
    if isinstance(error, TimeoutError):
        seconds = route.access.connect_seconds
        return f"no answer from {route.target} within {seconds:g} s; is the machine up?"
    if isinstance(error, ConnectionRefusedError):
        return f"{route.target} refuses connections; is sshd running there?"
    if "protocol banner" in str(error):
        what = f"within {route.access.banner_seconds:g} s"
        what = "before it hung up" if _was_dropped(error) else what
        return f"{route.target} did not speak SSH {what}"
    if str(error) == "No existing session":  # paramiko's words when the time for it is over
        seconds = route.access.handshake_seconds
        return f"{route.target} began to speak SSH, but agreed on no keys within {seconds:g} s"
    return f"no connection to {route.target}: {_words(error)}"


def _shut(route: Route, error: BaseException) -> str:
    """Why no program could be started at a host that let us in."""
    late = isinstance(error, TimeoutError) or "Timeout" in str(error)
    words = f"no answer within {route.access.channel_seconds:g} s" if late else _words(error)
    return f"{route.target} let us in, but starts no program: {words}"


def _no_verdict(error: paramiko.SSHException) -> bool:
    """Whether a host neither took nor refused a key in time."""
    tried = error.result if isinstance(error, AuthFailure) else ()
    return any(str(attempt.result) == "Authentication timeout." for attempt in tried)


def _login_stalled(route: Route) -> str:
    user, seconds = route.connection.user, route.access.login_seconds
    return f"{route.target} neither took nor refused a key of {user} within {seconds:g} s"


def _login_refused(route: Route, error: BaseException) -> str:
    user = route.connection.user
    strategy = error.result.strategy if isinstance(error, AuthFailure) else None
    if not isinstance(strategy, Keys):
        return f"login as {user} at {route.target} failed: {error}"
    if strategy.locked:
        return (
            f"the key {strategy.locked[0]} needs a passphrase; type: ssh-add {strategy.locked[0]}"
        )
    tried = strategy.tried
    keys = (
        f"none of {tried} keys was accepted, or the account is shut"
        if tried
        else "there is no key to log in with"
    )
    hint = f"ssh-copy-id -p {route.connection.port} {user}@{route.connection.host}"
    return f"login as {user} at {route.target} refused, {keys}; type: {hint}"


def _words(error: BaseException) -> str:
    """An exception's own words, or its name when it has none."""
    text = error.strerror if isinstance(error, OSError) else str(error)
    return text or str(error) or type(error).__name__
