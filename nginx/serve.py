"""Run nginx over a folder of shards, in a container or natively, and make sure that it ends.

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

from rackrun.atomic import translated_os_errors
from rackrun.contract.files import MANIFEST_NAME
from rackrun.errors import Problem
from rackrun.nginx import command
from rackrun.nginx.site import (
    INCLUDED,
    FolderError,
    ServeRefused,
    Site,
    checked,
    configuration,
    first_shard,
)
from rackrun.signals import has_ended

READY_SECONDS = 60.0  # Docker has taken more than 15 on a busy machine
ANSWER_SECONDS = 5.0
GRACE_SECONDS = 5.0
POLL_SECONDS = 0.02
NOBODY = 65534
LISTENS = "start worker process"  # in nginx's log, once the port is its own
LISTED_LINES = 3
INSTALL_DOCKER = "sudo apt-get install docker.io"
INSTALL_NGINX = "sudo apt-get install nginx-light"


@dataclass
class NginxServer:
    """A running nginx; `start` returns it once it has shown that it can read the folder."""

    site: Site
    path: str
    """The path below which the folder is served; it begins and ends with a slash."""
    why: str  # why it is a native nginx rather than a container; empty if that was asked for
    home: Path
    """Folder with its configuration, its log, and scratch/, where a native one may write.

    Its name is that of the container.
    """
    child: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        """Return the URL of the folder; it ends with a slash."""
        return f"http://{self.site.host}:{self.site.port}{self.path}"

    @property
    def alive(self) -> bool:
        """Return True while nginx runs."""
        return not has_ended(self.child)

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
            return text.replace(str(self.home / INCLUDED), str(self.site.include))
        return ""

    @property
    def last_words(self) -> str:
        """Return the lines that may tell why nginx has ended."""
        lines = [line.strip() for line in self.log.splitlines() if line.strip()]
        grave = [line for line in lines if "[emerg]" in line]
        return "; ".join((grave or lines)[-LISTED_LINES:]) or "it gave no reason"

    def stop(self) -> None:
        """End nginx and remove its files. May be called twice."""
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
            command.remove_container(self.home.name)
        shutil.rmtree(self.home, ignore_errors=True)


@contextlib.contextmanager
def serving(site: Site) -> Iterator[NginxServer]:
    """Serve while the block lasts; the server is gone afterwards, however it ends."""
    server = start(site)
    try:
        yield server
    finally:
        server.stop()


def start(site: Site, path: str = "/") -> NginxServer:
    """Start nginx and wait until it has served the manifest and a byte of a shard below `path`.

    The kernel ends nginx when the *thread* that called this ends: call it from one that lives as
    long as the server shall. Raises a Problem.
    """
    server = _launched(checked(site), path)
    try:
        _await_listening(server)
        _check_answers(server)
    except BaseException:
        server.stop()
        raise
    return server


def _launched(site: Site, path: str) -> NginxServer:
    site = replace(site, image=site.image or command.IMAGE)
    why = "" if site.native else _why_native(site)
    site = replace(site, native=site.native or bool(why))
    if site.native and not command.nginx():
        lack = "no nginx on this machine"
        docker = f"type {INSTALL_DOCKER}, or {INSTALL_NGINX}"
        raise ServeRefused(
            f"{why}, and {lack}; {docker}" if why else f"{lack}; type: {INSTALL_NGINX}"
        )
    name = Path(tempfile.gettempdir()) / "rackrun-nginx-"
    with translated_os_errors(name):
        home = Path(tempfile.mkdtemp(prefix=name.name))
        try:
            return NginxServer(site, path, why, home, _child(site, path, home))
        except BaseException:
            shutil.rmtree(home, ignore_errors=True)
            raise


def _why_native(site: Site) -> str:
    """Return why a native nginx has to do instead of a container; empty if none has to."""
    lack = command.why_not_contained(site.image)
    if lack and site.image != command.IMAGE:
        raise ServeRefused(f"{lack}; leave out --image, or type: {INSTALL_DOCKER}")
    return lack


def _child(site: Site, path: str, home: Path) -> subprocess.Popen[bytes]:
    # nginx is never root, and its configuration is for its own account alone.
    uid, gid = (os.getuid(), os.getgid()) if os.getuid() else (NOBODY, NOBODY)
    words = command.contained(site.image, site.folder, home, uid, gid)
    if site.native:
        words = command.native(home, uid, gid)
    scratch = home / "scratch"
    scratch.mkdir()
    for name, text in configuration(site, path, str(scratch) if site.native else "/tmp").items():
        (home / name).write_text(text)
    with (home / "log").open("wb") as log:
        if os.getuid() == 0:
            for each in (home, *home.iterdir()):
                os.chown(each, uid, gid)
        return subprocess.Popen(
            words,
            cwd=site.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for us; a run may read on while it stops
        )


def _await_listening(server: NginxServer) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while LISTENS not in server.log:  # until then, another server may answer at this port
        if not server.alive:
            raise ServeRefused(f"nginx did not start: {server.last_words}")
        if time.monotonic() > deadline:
            raise Problem(f"nginx does not listen at {server.url} after {READY_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)


def _check_answers(server: NginxServer) -> None:
    """Fetch the manifest and one byte of a shard as a reader would; a Problem if that fails."""
    status = _status(server, MANIFEST_NAME)
    if server.site.include and status in (401, 403):
        return  # it asks for a password or the like, as its lines say; we have none
    if status == 206:
        status = _status(server, first_shard(server.site.folder))
    if status != 206:
        folder = server.site.folder
        raise FolderError(
            f"{folder}: nginx, which is never root, cannot read it (status {status}); type:"
            f" chmod -R a+rX {shlex.quote(str(folder))}"
        )


def _status(server: NginxServer, name: str) -> int:
    site = server.site
    headers = {"Host": site.host, "Range": "bytes=0-0"}
    connection = http.client.HTTPConnection(site.address, site.port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", server.path + name, headers=headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise Problem(f"{server.url}{name}: not nginx's answer ({error!r})") from error
    finally:
        connection.close()
