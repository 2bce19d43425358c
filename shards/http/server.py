"""A server of one shard folder: its URL, our credentials, our connections to it.

Credentials and trusted authorities are files that the environment names, never a part of the URL.
"""

import base64
import contextlib
import ipaddress
import netrc
import os
import ssl
import urllib.parse
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from rackrun.contract import variables
from rackrun.errors import UsageError
from rackrun.shards.http.connection import Pool, Timeouts

_EXAMPLE = "http://HOST:PORT/"
_PATH_LETTERS = "/%:@!$&'()*+,;=~"  # what a path may hold as it is (RFC 3986)


class ShardServer:
    """A folder at an http(s):// URL, shared by all requests for its files."""

    def __init__(self, location: str, timeouts: Timeouts | None = None) -> None:
        self.location = location.rstrip("/") + "/"
        self.timeouts = timeouts or Timeouts()
        self.troubles = 0  # responses that broke off or did not arrive, and were requested again
        self._url = _checked(self.location)
        self._pools: dict[int, Pool] = {}

    def path(self, name: str) -> str:
        """Return the path of a file, as a request has it."""
        return urllib.parse.quote(self._url.path, safe=_PATH_LETTERS) + name

    @property
    def pool(self) -> Pool:
        """The connections of this process: after a fork, the child makes its own."""
        process = os.getpid()
        if process not in self._pools:
            context = tls_context() if self._tls else None
            port = self._url.port or (443 if self._tls else 80)
            self._pools[process] = Pool(self._host, port, context, self.timeouts)
        return self._pools[process]

    @cached_property
    def headers(self) -> dict[str, str]:
        """The headers of every request: credentials, and no content encoding."""
        return {"Accept-Encoding": "identity", **authorization(self._host, self._tls)}

    @property
    def _host(self) -> str:
        return self._url.hostname or ""

    @property
    def _tls(self) -> bool:
        return self._url.scheme == "https"


def _checked(location: str) -> urllib.parse.SplitResult:
    try:
        url = urllib.parse.urlsplit(location)
    except ValueError:
        raise UsageError(f"{location}: not the URL of a folder, as in {_EXAMPLE}") from None
    if url.username is not None:
        raise UsageError(
            f"{url.scheme}://…@{url.hostname}: passwords in URLs end up in logs; put user:password"
            f" into a file and type: export {variables.CREDENTIALS}=FILE"
        )
    try:
        whole = bool(url.hostname and url.hostname.encode("idna")) and url.port != 0
    except ValueError:  # a port that is none, a name that cannot be one
        whole = False
    if not whole or url.query or url.fragment or url.scheme not in ("http", "https"):
        raise UsageError(f"{location}: not the URL of a folder, as in {_EXAMPLE}")
    return url


def tls_context() -> ssl.SSLContext:
    """Return a TLS context with the named authority and client certificate, if any."""
    with _named_file(variables.AUTHORITY):
        context = ssl.create_default_context(cafile=os.environ.get(variables.AUTHORITY))
    if variables.CERTIFICATE in os.environ:
        with _named_file(variables.CERTIFICATE) as path:
            context.load_cert_chain(path, os.environ.get(variables.KEY))
    return context


def authorization(host: str, tls: bool) -> dict[str, str]:
    """Return the Authorization header, if any; UsageError for a password in the clear."""
    if variables.CREDENTIALS in os.environ:
        with _named_file(variables.CREDENTIALS) as path:
            secret = Path(path).read_text(encoding="utf-8").strip()
        if ":" not in secret or "\n" in secret:
            raise UsageError(f"{path}: must hold one line, user:password")
    else:
        secret = _secret_of_netrc(host)
    if not secret:
        return {}
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not tls and not is_loopback:
        raise UsageError(f"http://{host}: the password would cross the network in the clear")
    return {"Authorization": f"Basic {base64.b64encode(secret.encode()).decode()}"}


def _secret_of_netrc(host: str) -> str:
    with _named_file("NETRC", "~/.netrc"):
        try:
            credentials = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
        except FileNotFoundError:
            if "NETRC" in os.environ:
                raise
            return ""
        except netrc.NetrcParseError as error:
            raise UsageError(f"{error.filename}: {error.msg}") from None
    return f"{credentials[0]}:{credentials[2]}" if credentials else ""


@contextlib.contextmanager
def _named_file(variable: str, default: str = "") -> Iterator[str]:
    """Give the path that a variable names; an error in the block becomes one that names both."""
    path = os.environ.get(variable, default)
    try:
        yield path
    except (OSError, UnicodeDecodeError) as error:  # ssl.SSLError among them
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
        raise UsageError(f"{variable}={path}: {why}") from None
