"""A server of one shard folder: its URL, the versions of its files, its connections."""

import os
import urllib.parse
from functools import cached_property

from rackrun.contract import variables
from rackrun.errors import UsageError
from shards.http import auth
from shards.http.connection import Pool, Timeouts

_EXAMPLE = "http://HOST:PORT/"
_PATH_LETTERS = "/%:@!$&'()*+,;=~"  # what a path may hold as it is (RFC 3986)


class ShardServer:
    """A folder at an http(s):// URL, shared by all requests for its files."""

    def __init__(self, location: str, timeouts: Timeouts | None = None) -> None:
        self.location = location.rstrip("/") + "/"
        self.timeouts = timeouts or Timeouts()
        self.troubles = 0  # responses that broke off or did not arrive, and were requested again
        self.etags: dict[str, str] = {}  # of every file, as it was when first seen
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
            context = auth.context() if self._tls else None
            port = self._url.port or (443 if self._tls else 80)
            self._pools[process] = Pool(self._host, port, context, self.timeouts)
        return self._pools[process]

    @cached_property
    def headers(self) -> dict[str, str]:
        """The headers of every request: credentials, and no content encoding."""
        return {"Accept-Encoding": "identity", **auth.authorization(self._host, self._tls)}

    @property
    def _host(self) -> str:
        return self._url.hostname or ""

    @property
    def _tls(self) -> bool:
        return self._url.scheme == "https"


def _checked(location: str) -> urllib.parse.SplitResult:
    """Return the parts of a URL; raise UsageError if it cannot be the URL of a folder."""
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
