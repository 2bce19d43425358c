"""A served folder: its address, its readers, and nginx's configuration for both."""

import errno
import ipaddress
import os
import re
import shlex
import socket
import string
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from rackrun.commandline.options import Positional, Values
from rackrun.commands import called
from rackrun.contract.files import LARGEST_MANIFEST, MANIFEST_NAME
from rackrun.errors import DataError, Problem, UsageError
from rackrun.shapes import Misshapen, parsed_file

TEMPLATE = Path(__file__).with_name("nginx.conf.template")
INCLUDED = "included.conf"
SERVED = r"dataset(\.v[0-9]+)?\.json|[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.(tar|index\.npy)"
"""Names of manifests, shards and indexes, as nginx and Python match them."""
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
MOST_WORKERS = 16
LIST_ADDRESSES = "type: ip -brief a"


class FolderError(DataError):
    """The folder is not a complete one of shards, or the serving user cannot read it."""


class ServeRefused(Problem):
    """This machine cannot serve the folder as asked; nothing was started."""

    exit_code = 78


@dataclass(frozen=True)
class Site:
    """A folder of shards, and its server."""

    folder: Positional[Path]
    """Finished shard folder."""
    address: Annotated[str, Values("ADDRESS")] = "127.0.0.1"
    """IP address of this machine to listen on."""
    port: int = 8080
    """Port to listen on; 0: a free one."""
    names: Annotated[tuple[str, ...], Values("NAME")] = ()
    """Another host name for this machine that readers may use in URLs; repeatable."""
    native: bool = False
    """Run this machine's nginx instead of a container."""
    image: Annotated[str, Values("IMAGE")] = ""
    """Container image (default: the official nginx, pinned by its digest)."""
    include: Path | None = None
    """File of nginx directives for this server, such as those for TLS; with --native."""

    @property
    def host(self) -> str:
        """The address as it stands in a URL: IPv6 in brackets."""
        return f"[{self.address}]" if ":" in self.address else self.address


def checked(site: Site) -> Site:
    """Return the same site with the folder's absolute path and a port that is free.

    Raises UsageError for invalid options and what is no shard folder, FolderError for one that
    cannot be served, ServeRefused where another program listens.
    """
    for name in site.names:
        if not NAME.fullmatch(name):
            raise UsageError(f"--names {name!r}: not a host name")
    if site.include and not site.native:
        raise UsageError("--include needs --native: a container cannot read your files")
    _included(site.include)
    port, folder = _free_port(site), site.folder.resolve()
    if not (folder / MANIFEST_NAME).is_file():
        raise UsageError(
            f"{site.folder}: no {MANIFEST_NAME} in it, so this is not a complete folder of"
            f" shards; make one, type: {called('convert')} --help"
        )
    first_shard(folder)
    return replace(site, folder=folder, port=port)


def _free_port(site: Site) -> int:
    """Return the site's port, or a free one for 0."""
    try:
        address = ipaddress.ip_address(site.address)
    except ValueError:
        raise UsageError(
            f"--address {site.address}: not an IP address; list this machine's, {LIST_ADDRESSES}"
        ) from None
    if address.is_unspecified:
        raise UsageError(
            f"--address {site.address} would serve every network of this machine; name one"
            f" address, {LIST_ADDRESSES}"
        )
    if not 0 <= site.port < 65536:
        raise UsageError(f"--port {site.port}: not between 0 and 65535")
    try:
        with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((site.address, site.port))
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(
                f"--address {site.address}: not of this machine; list its own, {LIST_ADDRESSES}"
            ) from None
        if error.errno == errno.EADDRINUSE:
            taken = f"port {site.port} of {site.address} is taken"
            raise ServeRefused(f"{taken}; for a free one, type: --port 0") from None
        why = f"--port {site.port}: {error.strerror}; for a free one, type: --port 0"
        raise UsageError(why) from None


def first_shard(folder: Path) -> str:
    """Return the name of the first shard; FolderError unless it lies in the folder itself."""
    path = folder / MANIFEST_NAME
    try:
        splits = parsed_file(path, dict[str, Any], LARGEST_MANIFEST)["splits"]
        name = splits[0]["shards"][0]["name"]
        is_served = re.fullmatch(SERVED, name)
    except OSError as error:
        raise FolderError(f"{path}: cannot be read: {error.strerror}") from None
    except (Misshapen, LookupError, TypeError):
        raise FolderError(f"{path}: not the manifest of a data set; convert it again") from None
    if not is_served:
        why = "not a name that can be served"
        raise FolderError(f"{path}: {name[:80]!r}: {why}; convert it again")
    if (folder / name).is_symlink():
        target = shlex.quote(str((folder / name).resolve().parent))
        raise FolderError(
            f"{folder / name}: a link, and links are not followed; index the tars where they lie "
            f"({target}) and serve that folder"
        )
    if not (folder / name).is_file():
        raise FolderError(f"{folder / name}: is missing, so the folder cannot be served")
    return str(name)


class _Template(string.Template):
    """Placeholders as @{name}, because nginx's own variables begin with a dollar."""

    delimiter = "@"


def configuration(site: Site, path: str, scratch: str) -> dict[str, str]:
    """Return every file that nginx reads, by name; the folder is served below `path`.

    `scratch` is the one folder that nginx may write to. Names within nginx.conf are relative to
    it, so that the same text serves in a container and out of it.
    """
    local = ["localhost"] if ipaddress.ip_address(site.address).is_loopback else []
    host = socket.gethostname()
    ours = [host] if NAME.fullmatch(host) else []
    text = _Template(TEMPLATE.read_text()).substitute(
        workers=min(os.cpu_count() or 1, MOST_WORKERS),
        scratch=scratch,
        listen=f"{site.host}:{site.port}",
        names=" ".join([site.host, *local, *ours, *site.names]),
        path=path,
        served=SERVED,
    )
    return {"nginx.conf": text, INCLUDED: _included(site.include)}


def _included(path: Path | None) -> str:
    try:
        return path.read_text() if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--include {path}: cannot be read: {error}") from None
