"""Servers of tests: nginx, a proxy that spoils its answers, Docker."""

import base64
import contextlib
import hashlib
import io
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rackrun.nginx.serve import NginxServer, serving
from rackrun.nginx.site import Site
from tests.lab.needs import PATHS
from tests.lab.warm import ROOT

LINE = re.compile(r'"[A-Z]+ (\S+) [^"]*" (\d+) (\d+) ')  # of nginx's own format

LINKS = {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64", "sbin": "usr/sbin"}
BORROWED = sorted({"/usr", sys.base_prefix, sys.prefix, str(ROOT)})
"""What containers of a rank image need of this machine."""


def nginx_of(folder: Path) -> list[int]:
    """Return the processes of native servers of a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            is_nginx = (process / "comm").read_text() == "nginx\n"
            if is_nginx and (process / "cwd").readlink() == folder.resolve():
                found.append(int(process.name))
    return sorted(found)


@dataclass(frozen=True)
class AccessLog:
    """The access log of native servers."""

    include: Path
    log: Path

    def site(self, folder: Path) -> Site:
        """Return a server that writes into the log."""
        return Site(folder, port=0, native=True, include=self.include)

    @property
    def requests(self) -> list[tuple[str, int, int]]:
        """Return path, status and bytes of the body of each request so far."""
        return [(m[1], int(m[2]), int(m[3])) for m in LINE.finditer(self.log.read_text())]


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a folder on a plain web server, and the requests that it got."""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, code: object = "-", size: object = "-") -> None:
            asked.append(self.path)

    handler = partial(Handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


@contextmanager
def access_log() -> Iterator[AccessLog]:
    """Yield a log that any server may write to."""
    with open_folder() as folder:
        log = AccessLog(folder / "include", folder / "access.log")
        log.log.touch()
        log.log.chmod(0o666)
        log.include.write_text(f"access_log {log.log};\n")
        yield log


@contextmanager
def serving_with(folder: Path, lines: str, *files: Path) -> Iterator[NginxServer]:
    """Serve with lines of nginx's language; files that they name are copied to where it reads."""
    with open_folder() as copies:
        for file in files:
            shutil.copyfile(file, copies / file.name)
            lines = lines.replace(str(file), str(copies / file.name))
        (copies / "include").write_text(lines)
        site = Site(folder, port=0, native=True, include=copies / "include")
        with serving(site) as server:
            yield server


@contextmanager
def serving_tls(folder: Path, keys: Any, lines: str = "", *files: Path) -> Iterator[str]:
    """Yield the URL of a server with TLS, and with more lines."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    lines += f"listen {address} ssl;\nssl_certificate {keys.certificate};\n"
    lines += f"ssl_certificate_key {keys.key};\n"
    with serving_with(folder, lines, keys.certificate, keys.key, keys.authority, *files):
        yield f"https://{address}/"


def hashed(secret: str) -> str:
    """Return the line user:password as nginx wants it in a file of users."""
    user, _, password = secret.strip().partition(":")
    digest = hashlib.sha1(password.encode(), usedforsecurity=False).digest()
    return f"{user}:{{SHA}}{base64.b64encode(digest).decode()}\n"


@contextmanager
def open_folder() -> Iterator[Path]:
    """Yield a folder outside pytest's, which is closed to nginx, as that is never root."""
    with tempfile.TemporaryDirectory(prefix="rackrun-test-") as top:
        Path(top).chmod(0o755)
        yield Path(top)


@dataclass
class Answer:
    """An answer of the real server on its way to a client."""

    number: int  # of the request, counted from 0 over all connections
    request: bytes
    head: bytes  # with the empty line
    body: bytes
    client: socket.socket
    closing: threading.Event  # the proxy is being stopped

    def send(self, *, head: bytes | None = None, body: bytes | None = None) -> None:
        """Send it, or what is given instead of a part of it."""
        self.client.sendall(self.head if head is None else head)
        self.client.sendall(self.body if body is None else body)

    def hang_up(self) -> None:
        """Close the connection, orderly."""
        raise HangUp

    def reset(self) -> None:
        """Close the connection with a reset."""
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise HangUp

    def stall(self) -> None:
        """Send nothing more until the client has left or the proxy is stopped."""
        self.client.settimeout(0.05)
        while not self.closing.is_set():
            with contextlib.suppress(TimeoutError):
                if not self.client.recv(1, socket.MSG_PEEK):
                    break
                self.closing.wait(0.05)
        raise HangUp


class HangUp(Exception):
    """The connection has been spoilt and ends here."""


Fault = Callable[[Answer], None]


def pass_on(reply: Answer) -> None:
    """Change nothing."""
    reply.send()


class Proxy:
    """Listens on a free port; every answer of the real server goes through `fault`.

    Linux here has no netem: short bodies, stalls and resets in the middle come from this.
    """

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.fault: Fault = pass_on
        self.requests: list[bytes] = []
        self.bytes_sent = 0
        self._upstream = upstream
        self._closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._open: set[socket.socket] = set()
        self._start(self._accept)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def stop(self) -> None:
        """Close everything; returns when every thread has ended."""
        self._closing.set()
        for connection in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        self._open.add(client)
        with client, contextlib.suppress(HangUp, OSError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with socket.create_connection(self._upstream) as server:
                self._relay(client, server)
        self._open.discard(client)

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        with client.makefile("rb") as requests, server.makefile("rb") as replies:
            while request := _head(requests):
                server.sendall(request)
                head = _head(replies)
                length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
                body = replies.read(int(length[1])) if length else b""
                number = len(self.requests)
                self.requests.append(request)
                self.fault(Answer(number, request, head, body, client, self._closing))


def _head(stream: object) -> bytes:
    """Return the lines of a request or an answer up to the empty one."""
    lines = []
    while line := stream.readline():
        lines.append(line)
        if line == b"\r\n":
            return b"".join(lines)
    return b""


@contextmanager
def docker_daemon() -> Iterator[None]:
    """Start a Docker daemon where none answers, and let DOCKER_HOST lead to it meanwhile."""
    if docker("version").returncode == 0:
        yield
        return
    home = Path(tempfile.mkdtemp(prefix="rackrun-docker-"))
    log = (home / "log").open("wb")
    process = subprocess.Popen(
        [
            shutil.which("dockerd", path=PATHS) or "dockerd",
            *("--host", f"unix://{home}/docker.sock", "--pidfile", str(home / "pid")),
            *("--data-root", str(home / "data"), "--exec-root", str(home / "exec")),
            *("--bridge", "none", "--iptables=false", "--ip6tables=false"),
        ],
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DOCKER_HOST", f"unix://{home}/docker.sock")
        while docker("version").returncode != 0:
            assert process.poll() is None, (home / "log").read_text()
            time.sleep(0.05)
        yield
    process.terminate()
    process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    log.close()
    subprocess.run(["umount", str(home / "exec/netns/default")], check=False)  # dockerd forgets it
    shutil.rmtree(home, ignore_errors=True)


def docker(*args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the docker command."""
    return subprocess.run(["docker", *args], input=stdin, capture_output=True, check=False)


def nginx_image() -> str:
    """Make an image of this machine's nginx and the libraries that it loads; return its name."""
    binary = shutil.which("nginx", path=PATHS)
    assert binary, "tests/machine.sh installs nginx"
    listed = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
    libraries = {word for word in listed.split() if word.startswith("/")}
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", dereference=True) as tar:
        tar.add(binary, "usr/sbin/nginx")
        for library in sorted(libraries):
            tar.add(library, library.lstrip("/"))
    name = f"rackrun-test-nginx:{hashlib.sha256(archive.getvalue()).hexdigest()[:12]}"
    made = docker("import", "-", name, stdin=archive.getvalue())
    assert made.returncode == 0, made.stderr
    return name


@contextmanager
def rank_image() -> Iterator[str]:
    """Yield an image for ranks, whose programs are `BORROWED` of this machine."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, target in LINKS.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
    made = docker("import", "-", f"rackrun-test-ranks:{os.getpid()}", stdin=archive.getvalue())
    assert made.returncode == 0, made.stderr
    yield f"rackrun-test-ranks:{os.getpid()}"
    docker("image", "rm", "--force", f"rackrun-test-ranks:{os.getpid()}")
