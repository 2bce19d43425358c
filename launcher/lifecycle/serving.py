"""The shards of a run: which location a task reads, and who serves it to the hosts.

A folder of this machine is served by nginx for as long as the run lasts, and the task is given the
server's URL in its place. The kernel ends nginx with the launcher, however that ends.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.output.console import say
from launcher.run.job import Work, data_of, with_data
from launcher.run.settings import Serving
from nginx.restarting import RestartingServer
from rackrun.contract.files import MANIFEST_NAME
from rackrun.errors import Problem, UsageError

if TYPE_CHECKING:
    from nginx.serve import Server
    from nginx.site import Site

LOOPBACK = "127.0.0.1"


@contextmanager
def served(work: Work, serving: Serving, hosts: Sequence[str]) -> Iterator[Work]:
    """Yield the work, with a server's URL in place of its folder where hosts need one.

    `hosts` are the addresses by which the hosts are reached from here; empty where unknown.
    """
    folder = folder_to_serve(work, serving, hosts)
    if folder is None:
        yield work
        return
    from nginx.site import Site  # not for --help, nor for a run that serves nothing

    site = Site(
        folder,
        address=serving.serve_address or own_address(hosts),
        port=serving.serve_port,
        native=serving.serve_native,
        image=serving.serve_image,
    )
    with _running(site) as server:
        say(server.announcement)
        yield with_data(work, server.url)


def folder_to_serve(work: Work, serving: Serving, hosts: Sequence[str]) -> Path | None:
    """Return the folder of this machine to serve; None when there is none, or no need."""
    data = data_of(work)
    folder = Path(data).expanduser()
    if serving.serve and (not data or "://" in data):
        raise UsageError("--serve: serves the folder of a task; type: --serve TASK --data FOLDER")
    if serving.serve:
        return folder
    needed = any(not is_here(host) for host in hosts)
    is_ours = data != "" and (folder / MANIFEST_NAME).is_file()
    return folder if needed and is_ours and not serving.no_serve else None


def own_address(hosts: Sequence[str]) -> str:
    """Return the address of this machine that the hosts see, from the kernel's routes."""
    if any(not host for host in hosts):
        raise UsageError(
            "which address of this machine do hosts behind a gateway reach? type:"
            " --serve-address ADDRESS, or --no-serve where they have the data themselves"
        )
    ours = [_source_address(host) for host in hosts if not is_here(host)]
    return ours[0] if ours else LOOPBACK


def is_here(host: str) -> bool:
    """Return True for an address of this machine, False for an unknown one."""
    if not host:
        return False
    there = _numeric(host)
    return ipaddress.ip_address(there.partition("%")[0]).is_loopback or (
        _source_address(host) == there
    )


def _source_address(host: str) -> str:
    """Return the source address that the kernel picks towards a host; nothing is sent."""
    there = _numeric(host)
    family = socket.AF_INET6 if ":" in there else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((there, 9))
        except OSError as error:
            reason = f"no route from here to {host} ({error.strerror})"
            raise UsageError(f"{reason}; type: --serve-address ADDRESS") from None
        return str(sock.getsockname()[0])


def _numeric(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError:
        raise UsageError(
            f"address={host}: not known here, so what the hosts read from is unclear; type:"
            " --serve-address ADDRESS"
        ) from None


@contextmanager
def _running(site: Site) -> Iterator[Server]:
    """Run nginx over a folder; an error that keeps it from starting names the option."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(RestartingServer(site))
        except Problem as error:
            raise type(error)(f"--data {site.folder}: {error}") from None
        yield server
