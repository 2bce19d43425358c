"""Run nginx over a folder of shards, in a container or natively, and end it for certain.

with serving(Site(folder, address="10.0.0.1", port=0)) as server:
    print(server.url)
"""

import contextlib
import http.client
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rackrun.contract.files import MANIFEST_NAME
from rackrun.errors import Problem
from rackrun.nginx import docker, native
from rackrun.nginx.site import (
    INCLUDED,
    FolderError,
    PortTaken,
    ServeRefused,
    Site,
    checked,
    configuration,
    free_port,
)

READY_SECONDS = 60.0  # Docker has taken more than 15 on a busy machine
ANSWER_SECONDS = 5.0
GRACE_SECONDS = 5.0
POLL_SECONDS = 0.02
NOBODY = 65534
LISTENS = "start worker process"  # in nginx's log, once the port is its own
LISTED_LINES = 3


@dataclass
class NginxServer:
    """A running nginx that has shown that it can read the folder."""

    site: Site
    why: str  # why it is a native nginx rather than a container; empty if that was asked for
    home: Path
    """Folder with its configuration in etc/, its log, and scratch/, where a native one may write.

    Its name is that of the container.
    """
    child: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        """Return the URL of the folder; it ends with a slash."""
        return self.site.url

    @property
    def alive(self) -> bool:
        """Return True while nginx runs."""
        return self.child.poll() is None

    @property
    def announcement(self) -> str:
        """Return a line with the folder, the URL and the kind of server."""
        because = f", because {self.why}" if self.why else ""
        kind = f"nginx, pid {self.child.pid}" if self.site.native else f"container {self.home.name}"
        return f"serving {self.site.folder} at {self.url} ({kind}{because})"

    @property
    def log(self) -> str:
        """Return what nginx has written about its start and its end; of requests it is silent."""
        with contextlib.suppress(FileNotFoundError):  # it was stopped
            text = (self.home / "log").read_text(errors="replace")
            return text.replace(str(self.home / "etc" / INCLUDED), str(self.site.include))
        return ""

    @property
    def last_words(self) -> str:
        """Return the lines that may tell why nginx has ended."""
        lines = [line.strip() for line in self.log.splitlines() if line.strip()]
        grave = [line for line in lines if "[emerg]" in line]
        return "; ".join((grave or lines)[-LISTED_LINES:]) or "it gave no reason"

    def stop(self) -> None:
        """End nginx and remove its files; return when the port is free. May be called twice."""
        if not self.home.exists():
            return
        self.child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(GRACE_SECONDS)
        # Its group is its own. The workers are still there where the master was killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        if not self.site.native:
            docker.remove(self.home.name)
        deadline = time.monotonic() + GRACE_SECONDS
        while _is_taken(self.site) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        shutil.rmtree(self.home, ignore_errors=True)


def _is_taken(site: Site) -> bool:
    try:
        free_port(site)
    except PortTaken:
        return True
    return False


@contextlib.contextmanager
def serving(site: Site) -> Iterator[NginxServer]:
    """Serve while the block lasts; the server is gone afterwards, however it ends."""
    server = start(site)
    try:
        yield server
    finally:
        server.stop()


def start(site: Site) -> NginxServer:
    """Start nginx and wait until it has served the manifest and a byte of a shard.

    The kernel ends nginx when the *thread* that called this ends: call it from one that lives as
    long as the server shall. Raises a Problem.
    """
    for _ in range(3):
        try:
            return _start(checked(site))
        except PortTaken:
            if site.port:  # asked for; a free one that was taken meanwhile is only bad luck
                raise
    raise Problem(f"every free port of {site.address} was taken at once; try again")


def _start(site: Site) -> NginxServer:
    site, why = _choose(site)
    site = replace(site, port=free_port(site))
    server = _launch(site, why)
    try:
        _await_ready(server)
    except BaseException:
        server.stop()
        raise
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


def _launch(site: Site, why: str) -> NginxServer:
    # nginx is never root.
    uid, gid = (os.getuid(), os.getgid()) if os.getuid() else (NOBODY, NOBODY)
    home = _furnished(site, uid, gid)
    command = (
        native.command(home, uid, gid) if site.native else docker.command(site, home, uid, gid)
    )
    with (home / "log").open("ab") as log:
        child = subprocess.Popen(
            command,
            cwd=site.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for us; a run may read on while it stops
        )
    return NginxServer(site, why, home, child)


def _furnished(site: Site, uid: int, gid: int) -> Path:
    """Return a new folder with all that nginx reads."""
    home = Path(tempfile.mkdtemp(prefix="rackrun-nginx-"))
    for folder in (home, home / "etc", home / "scratch"):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o711)
    if os.getuid() == 0:
        os.chown(home / "scratch", uid, gid)
    scratch = str(home / "scratch") if site.native else "/tmp"
    for name, text in configuration(site, scratch).items():
        (home / "etc" / name).write_text(text)
        (home / "etc" / name).chmod(0o644)
    return home


def _await_ready(server: NginxServer) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while LISTENS not in server.log:  # until then, another server may answer at this port
        if not server.alive:
            raise _explained(server)
        if time.monotonic() > deadline:
            raise Problem(f"nginx does not listen at {server.url} after {READY_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)
    check(server.site)


def _explained(server: NginxServer) -> Problem:
    if "address already in use" in server.log.lower():
        return PortTaken(f"{server.url}: the port was taken meanwhile; type the same again")
    return ServeRefused(f"nginx did not start: {server.last_words}")


def check(site: Site) -> None:
    """Fetch the manifest and one byte of a shard as a reader would.

    Raises FolderError when files cannot be read, Problem when the answer is not that of a web
    server.
    """
    status = _get(site, MANIFEST_NAME, {})
    if site.include and status in (401, 403):
        return  # it asks for a password or the like, as its lines say; we have none
    if status == 200:
        status = _get(site, site.shard, {"Range": "bytes=0-0"})
        if status == 206:
            return
    raise FolderError(
        f"{site.folder}: nginx, which is never root, cannot read it (status {status}); type:"
        f" chmod -R a+rX {shlex.quote(str(site.folder))}"
    )


def _get(site: Site, name: str, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection(site.address, site.port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", f"/{name}", headers={"Host": site.host, **headers})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise Problem(f"{site.url}{name}: no answer as from nginx ({error!r})") from error
    finally:
        connection.close()
