"""Run nginx over a folder of shards, in a container or natively, and end it for certain.

with serving(Site(folder, address="10.0.0.1", port=0)) as server:
    print(server.url)
"""

import contextlib
import http.client
import os
import shlex
import shutil
import ssl
import subprocess
import time
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from rackrun.commands import called
from rackrun.contract.files import MANIFEST_NAME
from rackrun.errors import Problem
from rackrun.nginx import docker, native, registry
from rackrun.nginx.account import Account, account_of
from rackrun.nginx.logs import Logs, ServerTraffic
from rackrun.nginx.registry import ServerProcess, ServerRecord
from rackrun.nginx.site import (
    FolderError,
    PortTaken,
    ServeRefused,
    Site,
    checked,
    configuration,
    free_port,
    user_and_password,
)

READY_SECONDS = 60.0  # Docker has taken more than 15 on a busy machine
ANSWER_SECONDS = 5.0
NAME_FIELD = "X-Served-By"


@dataclass
class NginxServer:
    """A running nginx that has shown that it can read the folder."""

    site: Site
    record: ServerRecord
    why: str  # why it is a native nginx rather than a container; empty if that was asked for
    child: subprocess.Popen[bytes]
    account: Account
    traffic: ServerTraffic = field(init=False)
    logs: Logs = field(init=False)

    def __post_init__(self) -> None:
        self.traffic = ServerTraffic(self.record.home / "access.log")
        self.logs = Logs(self.traffic.log, self.record.home / "error.log")

    @property
    def url(self) -> str:
        """Return the URL of the folder; it ends with a slash."""
        return self.site.url

    @property
    def alive(self) -> bool:
        """Return True while nginx runs."""
        return self.record.process.alive

    @property
    def announcement(self) -> str:
        """Return a line with the folder, the URL and the kind of server."""
        because = f", because {self.why}" if self.why else ""
        user = f"; {self.account.why}" if self.account.why else ""
        return f"serving {self.record.folder} at {self.url} ({self.record.runs_as}{because}{user})"

    def stop(self) -> None:
        """End nginx and remove its files; return when the port is free. May be called twice."""
        self.logs.stop()
        stop(self.record)
        self.child.wait()


@contextlib.contextmanager
def serving(site: Site) -> Iterator[NginxServer]:
    """Serve while the block lasts; the server is gone afterwards, however it ends."""
    server = start(site)
    try:
        yield server
    finally:
        server.stop()


def start(site: Site, detach: bool = False) -> NginxServer:
    """Start nginx and wait until it has served the manifest and a byte of a shard.

    Unless detached, the kernel ends nginx when the *thread* that called this ends: call it from
    one that lives as long as the server shall. Raises a Problem.
    """
    for _ in range(3):
        try:
            return _start(checked(site), detach)
        except PortTaken:
            if site.port:  # asked for; a free one that was taken meanwhile is only bad luck
                raise
    raise Problem(f"every free port of {site.address} was taken at once; try again")


def _start(site: Site, detach: bool) -> NginxServer:
    site, why = _choose(site)
    with registry.alone():
        if registry.name_of(site) in [record.name for record in _alive()]:
            raise ServeRefused(
                f"{site.folder} is already served at {site.url}; to end that, type:"
                f" {called('serve')} stop {shlex.quote(str(site.folder))} --port {site.port}"
            )
        site = replace(site, port=free_port(site))
        account = account_of(site, registry.name_of(site))
        server = _launch(site, _furnish(site, account), account, why, detach)
        # Open: if this nginx ends, another start may remove its files before they are read.
        log = (server.record.home / "error.log").open(errors="replace")
    try:
        with log:
            _await_ready(server, log)
    except BaseException:
        server.stop()
        raise
    if not detach:
        server.logs.keep_short()
    return server


def _choose(site: Site) -> tuple[Site, str]:
    """Return the site with `native` decided, and why it is native without --native."""
    if site.native:
        if lack := native.missing():
            raise ServeRefused(f"{lack}; type: {native.INSTALL}")
        return site, ""
    lack = docker.missing() or docker.fetch(site.image or docker.IMAGE)
    if not lack:
        return site, ""
    if site.image:
        raise ServeRefused(f"{lack}; leave out --image, or type: {docker.INSTALL}")
    if native.missing():
        raise ServeRefused(
            f"{lack}, and {native.missing()}; type {docker.INSTALL}, or {native.INSTALL}"
        )
    return replace(site, native=True), lack


def _furnish(site: Site, account: Account) -> Path:
    """Make the server's folder with all that nginx reads; secrets only for the serving user."""
    home = registry.base() / registry.name_of(site)
    shutil.rmtree(home, ignore_errors=True)
    for folder in (home, home / "etc", home / "scratch"):
        folder.mkdir(mode=0o711, exist_ok=True)
    if site.native:
        os.chown(home / "scratch", account.uid, account.gid)
    scratch = str(home / "scratch") if site.native else "/tmp"
    for file, text in configuration(site, scratch, home.name).items():
        _write(home / "etc" / file, text, account)
    for log in ("access.log", "error.log"):
        _write(home / log, "", account)
    return home


def _write(path: Path, text: str, account: Account) -> None:
    """Write a file for that user alone; without root it holds no secret and is open."""
    path.touch(mode=0o600)
    path.write_text(text)
    if os.getuid() in (0, account.uid):
        os.chown(path, account.uid, account.gid)
    else:
        path.chmod(0o644)


def _launch(site: Site, home: Path, account: Account, why: str, detach: bool) -> NginxServer:
    if site.native:
        args = native.command(home, account, detach)
    else:
        docker.refuse_foreign(home.name)
        args = docker.command(site, home.name, home, account, detach)
    with (home / "access.log").open("ab") as log, (home / "error.log").open("ab") as errors:
        child = subprocess.Popen(
            args,
            cwd=site.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=errors,
            start_new_session=True,  # Ctrl-C is for us; a run may read on while it stops
            restore_signals=False,  # SIGXFSZ stays ignored: a full log ends no process
        )
    process = ServerProcess.of(child.pid)
    if detach and not site.native:
        child.wait()
        process = ServerProcess.of(docker.pid(home.name))
    record = ServerRecord(
        home.name, str(site.folder), site.url, process, not site.native, time.time()
    )
    record.write()
    return NginxServer(site, record, why, child, account)


def _await_ready(server: NginxServer, log: TextIO) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        if not server.alive:
            raise _explained(server, log.read())
        with contextlib.suppress(ConnectionRefusedError):
            return check(server.site)
        if time.monotonic() > deadline:
            raise Problem(f"nginx does not listen at {server.url} after {READY_SECONDS:.0f} s")
        time.sleep(0.02)


def _explained(server: NginxServer, log: str) -> Problem:
    if server.record.container:
        log += docker.log_of(server.record.name)
    if "address already in use" in log.lower():
        return PortTaken(f"{server.url}: the port was taken meanwhile; type the same again")
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return ServeRefused("nginx did not start: " + "; ".join(lines[-3:] or ["it gave no reason"]))


def check(site: Site) -> None:
    """Fetch the manifest and one byte of a shard as a reader would.

    Raises ConnectionRefusedError while no server listens, PortTaken when another one answers (our
    nginx tries to listen for two more seconds then, and ends), FolderError when files cannot be
    read, Problem when the answer is not that of a web server.
    """
    status = _get(site, MANIFEST_NAME, {})
    if status == 403 and site.client_ca:
        return  # it asks for a certificate, as it should; we have none to show
    if status == 200:
        status = _get(site, site.shard, {"Range": "bytes=0-0"})
        if status == 206:
            return
    raise FolderError(
        f"{site.folder}: nginx, which is never root, cannot read it (status {status}); type:"
        f" chmod -R a+rX {shlex.quote(str(site.folder))}"
    )


def _get(site: Site, name: str, headers: dict[str, str]) -> int:
    """Return the status; ConnectionRefusedError where no server listens, else Problem."""
    if site.credentials:
        secret = ":".join(user_and_password(site.credentials)).encode()
        headers = {**headers, "Authorization": f"Basic {b64encode(secret).decode()}"}
    connection = _connect(site)
    try:
        connection.request("GET", f"/{name}", headers={"Host": site.host, **headers})
        response = connection.getresponse()
        if response.getheader(NAME_FIELD) != registry.name_of(site):
            raise PortTaken(f"{site.url}: another server answers there; type the same again")
        return response.status
    except (ConnectionRefusedError, PortTaken):
        raise
    except (OSError, http.client.HTTPException) as error:
        raise Problem(f"{site.url}{name}: no answer as from nginx ({error!r})") from error
    finally:
        connection.close()


def _connect(site: Site) -> http.client.HTTPConnection:
    if not site.certificate:
        return http.client.HTTPConnection(site.address, site.port, timeout=ANSWER_SECONDS)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # it is ourselves that we ask, and nothing secret is sent
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(
        site.address, site.port, timeout=ANSWER_SECONDS, context=context
    )


def stop(record: ServerRecord) -> None:
    """End the server of this record and remove its files."""
    with registry.alone():
        _stop(record)


def _stop(record: ServerRecord) -> None:
    """End a server; its name and files are left to another that has taken them over since."""
    if not record.container:
        record.process.end()
    if registry.read(record.home) in (None, record):
        if record.container:
            docker.remove(record.name)
        record.forget()


def servers() -> list[ServerRecord]:
    """Return the running servers of this user; remove what killed ones have left."""
    with registry.alone():
        return _alive()


def _alive() -> list[ServerRecord]:
    registry.clear()
    alive = []
    for record in registry.records():
        if record.process.alive:
            alive.append(record)
        elif not record.process.is_elsewhere:
            with contextlib.suppress(Problem):  # who cannot ask Docker leaves a container its files
                _stop(record)
    return alive
