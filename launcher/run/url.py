"""The URL of a shard folder as it was typed, held against what ranks can read.

Refused before a host is asked, and before it is written down anywhere: a password in it would be in
the plan, in command lines and in logs. The message never repeats it.
"""

from __future__ import annotations

import urllib.parse

from rackrun.contract import variables
from rackrun.errors import UsageError
from rackrun.terminal import one_line

LONGEST_LABEL = 63
WITHOUT = f"put user:password into a file and type: export {variables.CREDENTIALS}=FILE"


def check_url(location: str) -> None:
    """Raise UsageError for a URL that is not that of a folder, or that holds a password."""
    try:
        url = urllib.parse.urlsplit(location)
        port, host = url.port, url.hostname or ""
    except ValueError:  # a bracket, or a port that is none; its text may be a secret
        raise UsageError("--data: not a URL; type for example: --data http://HOST:PORT/") from None
    if url.scheme not in ("http", "https"):
        scheme = one_line(url.scheme)
        raise UsageError(f"--data {scheme}://…: data are read from a folder or from http(s)://")
    if "@" in url.netloc:
        raise UsageError(f"--data {url.scheme}://…: passwords in URLs end up in logs; {WITHOUT}")
    if port == 0 or not _is_host(host) or url.query or url.fragment:
        shown = one_line(location)
        raise UsageError(f"--data {shown}: not the URL of a folder, as in http://HOST:PORT/")
    if not (url.path.isascii() and location.isprintable()) or " " in location:
        quoted = urllib.parse.quote(url.path, errors="surrogateescape")  # bytes that are no UTF-8
        shown = one_line(location)
        raise UsageError(f"--data {shown}: write it as it goes over the wire: …{quoted}")


def _is_host(name: str) -> bool:
    """Return True for a name that can be resolved: labels of bounded length, valid in IDNA."""
    try:
        labels = name.encode("idna").removesuffix(b".").split(b".")
    except UnicodeError:
        return False
    return all(0 < len(label) <= LONGEST_LABEL for label in labels)
