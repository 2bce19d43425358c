"""The shards of a run: which location a task reads, and which server provides it to the hosts.

A folder on this machine is served by nginx while the run lasts, and the task gets the server's URL
instead. The kernel ends nginx with the launcher, however the launcher ends.
"""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rackrun.commandline.conditions import Condition, changed_settings, refuse_without_effect
from rackrun.contract.files import MANIFEST_NAME
from rackrun.data_location import is_folder
from rackrun.errors import Problem, UsageError
from rackrun.launcher.output.console import say
from rackrun.launcher.remote.network import route
from rackrun.launcher.run.job import Work, data_of, with_data
from rackrun.launcher.run.settings import SERVER, Serving
from rackrun.shard_folder import folder_and_version

if TYPE_CHECKING:
    from rackrun.nginx.serve import NginxServer
    from rackrun.nginx.site import Site

LOOPBACK = "127.0.0.1"
SECRET_BYTES = 16
SERVED_PATH = re.compile(r"/[A-Za-z0-9_-]{22}/(@[1-9][0-9]{0,4})?")
"""The path of the URL that a run's server gives its ranks: a secret, and a version of the data."""
NOTICED_SECONDS = 0.1  # until a server that ended is noticed
LONGEST_PAUSE_SECONDS = 30.0  # before another start, doubled while starts fail


@contextmanager
def served(work: Work, serving: Serving, hosts: Sequence[str]) -> Iterator[Work]:
    """Yield the work, with a server's URL in place of its folder where hosts need one.

    `hosts` are the addresses by which the hosts are reached from here; empty where unknown.
    """
    folder = folder_to_serve(work, serving, hosts)
    if folder is None:
        yield work
        return
    from rackrun.nginx.site import Site  # not for --help, nor for a run that serves nothing

    site = Site(
        folder,
        address=serving.serve_address or own_address(hosts),
        port=serving.serve_port,
        native=serving.serve_native,
        image=serving.serve_image,
    )
    with RestartingServer(site) as server:
        say(server.announcement)
        version = folder_and_version(data_of(work))[1]
        yield with_data(work, server.url + (f"@{version}" if version else ""))


def folder_to_serve(work: Work, serving: Serving, hosts: Sequence[str]) -> Path | None:
    """Return the folder of this machine to serve; None when there is none, or no need."""
    data = data_of(work)
    if not data or not is_folder(data):
        _refuse_settings_of_no_server(serving, data)
        return None
    folder = Path(folder_and_version(data)[0]).expanduser()
    if serving.serve:
        return folder
    is_needed = any(not is_here(host) for host in hosts)
    is_ours = (folder / MANIFEST_NAME).is_file()
    if is_needed and is_ours and not serving.no_serve:
        return folder
    _refuse_settings_of_no_server(serving, data, is_needed)
    return None


def _refuse_settings_of_no_server(serving: Serving, data: str, is_needed: bool = True) -> None:
    # Only where it is certain that nothing is served: a host of unknown address may need a server.
    if serving.serve and (not data or not is_folder(data)):
        raise UsageError("--serve: serves the folder of a task; type: --serve TASK --data FOLDER")
    reason, remedy = "", ""
    if not data:
        reason, remedy = "without --data there is nothing to serve", "TASK --data FOLDER"
    elif not is_folder(data):
        reason, remedy = "only a folder in --data is served, and only one", "--data FOLDER"
    elif not is_needed:
        reason, remedy = "this machine reads the folder of --data itself", "--serve too"
    condition = Condition(SERVER, lambda _: not reason, reason, remedy)
    refuse_without_effect(serving, changed_settings(serving), [condition])


def own_address(hosts: Sequence[str]) -> str:
    """Return the address of this machine that the hosts see, from the kernel's routes."""
    if any(not host for host in hosts):
        raise UsageError(
            "which address of this machine do hosts behind a gateway reach? type:"
            " --serve-address ADDRESS, or --no-serve if they have the data themselves"
        )
    routes = map(_route_to, hosts)
    return next((ours for ours, theirs in routes if not _leads_here(ours, theirs)), LOOPBACK)


def is_here(host: str) -> bool:
    """Return True for an address of this machine, False for an unknown one."""
    return bool(host) and _leads_here(*_route_to(host))


def _leads_here(ours: str, theirs: str) -> bool:
    return ours == theirs or ipaddress.ip_address(theirs.partition("%")[0]).is_loopback


def _route_to(host: str) -> tuple[str, str]:
    # the addresses of this machine and of the host on the way between them
    try:
        ends = route(host)
    except OSError as error:
        reason = f"no route from here to {host} ({error.strerror})"
        raise UsageError(f"{reason}; type: --serve-address ADDRESS") from None
    return ends["address"], ends["master"]


class RestartingServer:
    """nginx for as long as the run, as a context that gives the first server; raises a Problem.

    It serves below a path that only the run knows, so whoever else finds the port reads nothing.
    One that ends is started again: schedulers signal every process of a job, and ranks still need a
    batch to come to where they can save.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.path = f"/{secrets.token_urlsafe(SECRET_BYTES)}/"
        self.started: queue.Queue[NginxServer | Exception] = queue.Queue()
        self.enough = threading.Event()
        # The kernel ends nginx with the thread that started it: so that is the one that tends it.
        self.thread = threading.Thread(target=self._tend, daemon=True)

    def __enter__(self) -> NginxServer:
        self.thread.start()
        first = self.started.get()
        if isinstance(first, Problem):
            raise type(first)(f"--data {self.site.folder}: {first}") from None
        if isinstance(first, Exception):  # of ours; the launcher would wait for ever
            raise first
        return first

    def __exit__(self, *reason: object) -> None:
        self.enough.set()
        self.thread.join()

    def _tend(self) -> None:
        from rackrun.nginx.serve import start

        try:
            server = start(self.site, self.path)
        except Exception as error:  # raised again by whoever waits for the server
            self.started.put(error)
            return
        self.started.put(server)
        pause = NOTICED_SECONDS
        while not self.enough.wait(pause):
            pause = NOTICED_SECONDS if server.alive else min(2 * pause, LONGEST_PAUSE_SECONDS)
            if not server.alive:
                server.stop()
                with contextlib.suppress(Problem):  # the ranks report that no server answers
                    server = start(server.site, self.path)
        server.stop()
