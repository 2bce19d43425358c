"""A served folder: its address, its readers, and nginx's configuration for both."""

import base64
import errno
import hashlib
import ipaddress
import os
import re
import shlex
import socket
import string
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rackrun.commandline.options import Positional
from rackrun.commands import called
from rackrun.contract.files import LARGEST_MANIFEST, MANIFEST_NAME
from rackrun.errors import DataError, Problem, UsageError
from rackrun.shapes import Misshapen, parsed_file

TEMPLATE = Path(__file__).with_name("nginx.conf.template")
EARLIER_MANIFEST = re.compile(r"dataset\.v[0-9]+\.json")
DATASET = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
LISTED_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}(\.tar|\.index\.npy)")
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


class FolderError(DataError):
    """The folder is not a complete one of shards, or the serving user cannot read it."""


class ServeRefused(Problem):
    """This machine cannot serve the folder as asked; nothing was started."""

    exit_code = 78


class PortTaken(ServeRefused):
    """Another program listens at the address and port."""


@dataclass(frozen=True)
class Site:
    """One folder of shards at one address."""

    folder: Positional[Path]
    """Finished shard folder."""
    address: str = "127.0.0.1"
    """IP address of this machine to listen on."""
    port: int = 8080
    """Port to listen on; 0: a free one."""
    names: tuple[str, ...] = ()
    """Another host name that readers may use for this machine in their URLs; repeatable."""
    native: bool = False
    """Run this machine's nginx instead of a container."""
    image: str = ""
    """Container image (default: the official nginx, pinned by its digest)."""
    memory: int = 0
    """Memory limit of the container in MiB, its page cache included; 0: half of this machine's."""
    certificate: Path | None = None
    """Serve over TLS with this certificate (PEM, with its chain)."""
    key: Path | None = None
    """Private key of the certificate (PEM)."""
    client_ca: Path | None = None
    """Serve only clients with a certificate from this authority (PEM)."""
    credentials: Path | None = None
    """Serve only clients with the user:password in this file's one line (basic auth)."""

    @property
    def url(self) -> str:
        """Return the URL of the folder; it ends with a slash."""
        scheme = "https" if self.certificate else "http"
        return f"{scheme}://{self.host}:{self.port}/"

    @property
    def host(self) -> str:
        """The address as it stands in a URL: IPv6 in brackets."""
        return f"[{self.address}]" if ":" in self.address else self.address

    @property
    def loopback(self) -> bool:
        """Return True if only this machine can reach the address."""
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def secret(self) -> str:
        """Return why nginx needs a file that is secret; empty if it needs none."""
        return "it has a key or a password to keep" if self.key or self.credentials else ""

    @property
    def workers(self) -> int:
        """Return the number of nginx's processes, which is that of the cores it can use."""
        return min(os.cpu_count() or 1, 16)

    @property
    def shard(self) -> str:
        """The file name of the first shard."""
        return first_shard(self.folder)


def checked(site: Site) -> Site:
    """Return the same site with an absolute folder and files that exist.

    Raises UsageError for invalid options, FolderError for an incomplete folder.
    """
    _check_address(site)
    for name in site.names:
        if not NAME.fullmatch(name):
            raise UsageError(f"--names {name!r}: not a host name")
    _check_access(site)
    folder = site.folder.resolve()
    if not str(folder).isprintable():
        raise FolderError(f"{ascii(str(folder))}: no name to show to people; rename it")
    if not folder.is_dir():
        raise FolderError(f"{site.folder}: no such folder; type: {called('convert')} --help")
    if not (folder / MANIFEST_NAME).is_file():
        raise FolderError(
            f"{site.folder}: no {MANIFEST_NAME} in it, so this is not a complete folder of"
            f" shards; make one, type: {called('convert')} --help"
        )
    first_shard(folder)
    return replace(site, folder=folder)


def _check_address(site: Site) -> None:
    try:
        address = ipaddress.ip_address(site.address)
    except ValueError:
        raise UsageError(
            f"--address {site.address}: not an IP address; list this machine's, type: ip -brief a"
        ) from None
    if address.is_unspecified:
        raise UsageError(
            f"--address {site.address} would serve every network of this machine; name one"
            " address, type: ip -brief a"
        )
    if not 0 <= site.port < 65536:
        raise UsageError(f"--port {site.port}: not between 0 and 65535")


def _check_access(site: Site) -> None:
    if (site.certificate is None) != (site.key is None):
        raise UsageError("--certificate and --key belong together: give both")
    if site.client_ca and not site.certificate:
        raise UsageError("--client-ca needs TLS: give --certificate and --key too")
    if site.credentials and not site.certificate and not site.loopback:
        raise UsageError(
            f"--credentials at {site.address} would send the password in the clear: give"
            " --certificate and --key too"
        )
    for path in (site.certificate, site.key, site.client_ca):
        if path:
            _read(path)
    if site.credentials:
        user_and_password(site.credentials)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def user_and_password(path: Path) -> tuple[str, str]:
    """Return the user name and the password in a file of one line, user:password."""
    user, colon, password = _read(path).decode(errors="replace").strip().partition(":")
    if not user or not colon or not password or "\n" in password:
        raise UsageError(f"{path}: must hold one line, user:password")
    return user, password


def free_port(site: Site) -> int:
    """Return the site's port, or a free one for 0; PortTaken if another program listens there."""
    family = socket.AF_INET6 if ":" in site.address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((site.address, site.port))
        except OSError as error:
            raise _no_port(site, error) from None
        return int(probe.getsockname()[1])


def _no_port(site: Site, error: OSError) -> Problem:
    if error.errno == errno.EADDRINUSE:
        endpoint = f"port {site.port} of {site.address}"
        return PortTaken(f"{endpoint} is taken; for a free one, type: --port 0")
    if error.errno == errno.EADDRNOTAVAIL:
        return UsageError(
            f"--address {site.address}: not of this machine; list its own, type: ip -brief a"
        )
    return UsageError(f"--port {site.port}: {error.strerror}; for a free one, type: --port 0")


class _Template(string.Template):
    """Placeholders as @{name}, because nginx's own variables begin with a dollar."""

    delimiter = "@"


def configuration(site: Site, scratch: str, name: str) -> dict[str, str]:
    """Return every file that nginx reads, by name: nginx.conf and, for limited access, secrets.

    `name` is that of the server, which it sends with every answer.
    `scratch` is the one folder that nginx may write to. Names within nginx.conf are relative to
    it, so that the same text serves in a container and out of it.
    """
    text = _Template(TEMPLATE.read_text()).substitute(
        workers=site.workers,
        scratch=scratch,
        name=name,
        listen=f"{site.host}:{site.port}" + (" ssl" if site.certificate else ""),
        names=" ".join(_names(site)),
        tls=_block(_tls(site), 4),
        access=_block(_access(site), 8),
    )
    listed = as_map(listed_names(site.folder)) + later_versions(site.folder)
    return {"nginx.conf": text, "listed": listed} | _secrets(site)


def _names(site: Site) -> list[str]:
    local = ["localhost"] if site.loopback else []
    host = socket.gethostname()
    return [site.host, *local, *([host] if NAME.fullmatch(host) else []), *site.names]


def _block(lines: list[str], indent: int) -> str:
    return "".join(f"{' ' * indent}{line}\n" for line in lines)


def _tls(site: Site) -> list[str]:
    if not site.certificate:
        return []
    lines = [
        "ssl_certificate certificate.pem;",
        "ssl_certificate_key key.pem;",
        "ssl_protocols TLSv1.2 TLSv1.3;",
        "ssl_session_tickets off;",  # their key would open what was recorded before
    ]
    if site.client_ca:
        lines += ["ssl_client_certificate client-ca.pem;", "ssl_verify_client optional;"]
    return lines


def _access(site: Site) -> list[str]:
    lines = []
    if site.client_ca:
        lines += [
            "if ($ssl_client_verify != SUCCESS) {",
            "    return 403;",
            "}",
            "error_page 403 @refused;",
        ]
    if site.credentials:
        lines += ["auth_basic shards;", "auth_basic_user_file users;", "error_page 401 @refused;"]
    return lines


def _secrets(site: Site) -> dict[str, str]:
    files = {
        "certificate.pem": site.certificate,
        "key.pem": site.key,
        "client-ca.pem": site.client_ca,
    }
    secrets = {name: _read(path).decode() for name, path in files.items() if path}
    if site.credentials:
        user, password = user_and_password(site.credentials)
        # Salted SHA-1 needs no libcrypt. nginx hashes at every request, so the strength must be in
        # the password, not in a slow hash.
        salt = os.urandom(16)
        digest = hashlib.sha1(password.encode() + salt, usedforsecurity=False).digest()
        secrets["users"] = f"{user}:{{SSHA}}{base64.b64encode(digest + salt).decode()}\n"
    return secrets


def listed_names(folder: Path) -> list[str]:
    """Return the names of the shards and indexes of all versions; FolderError for none.

    The shards of the newest one are the first.
    """
    try:
        files = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise FolderError(f"{folder}: cannot be read: {error.strerror}") from None
    names = sorted(name for name in files if EARLIER_MANIFEST.fullmatch(name))
    return list(
        dict.fromkeys(name for each in (MANIFEST_NAME, *names) for name in _names_in(folder / each))
    )


def _names_in(path: Path) -> list[str]:
    try:
        splits = parsed_file(path, dict[str, Any], LARGEST_MANIFEST)["splits"]
        names = [shard["name"] for split in splits for shard in split["shards"]]
        names += [split["index"] for split in splits if "index" in split]
        wrong = [name for name in names if not LISTED_NAME.fullmatch(name)]
    except OSError as error:
        raise FolderError(f"{path}: cannot be read: {error.strerror}") from None
    except (Misshapen, KeyError, TypeError, AttributeError):
        raise FolderError(f"{path}: not the manifest of a data set; convert it again") from None
    if not names or wrong or len({name.lower() for name in names}) < len(names):
        why = "names that no server may give away" if names else "no shards in it"
        raise FolderError(f"{path}: {why}; convert it again")
    return names


def first_shard(folder: Path) -> str:
    """Return the name of the first shard; FolderError unless it lies in the folder itself."""
    name = listed_names(folder)[0]
    if (folder / name).is_symlink():
        target = shlex.quote(str((folder / name).resolve().parent))
        raise FolderError(
            f"{folder / name}: a link, and links are not followed; index the tars where they lie "
            f"({target}) and serve that folder"
        )
    if not (folder / name).is_file():
        raise FolderError(f"{folder / name}: is missing, so the folder cannot be served")
    return name


def as_map(names: list[str]) -> str:
    """Return the lines of nginx's `map` from each path to itself."""
    return "".join(f'"/{name}" "/{name}";\n' for name in (MANIFEST_NAME, *names))


def later_versions(folder: Path) -> str:
    """Return lines of the same map for what versions are called that are made while nginx runs."""
    dataset = parsed_file(folder / MANIFEST_NAME, dict[str, Any], LARGEST_MANIFEST).get("dataset")
    if not isinstance(dataset, str) or not DATASET.fullmatch(dataset):
        return ""
    names = (
        r"dataset\.v[0-9]+\.json",
        rf"{dataset}-[A-Za-z0-9_-]+-[0-9]{{6,9}}\.tar",
        rf"{dataset}-[A-Za-z0-9_-]+\.v[0-9]+\.index\.npy",
    )
    return "".join(f'"~^/{name}$" $uri;\n' for name in names)
