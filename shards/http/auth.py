"""Credentials and trusted authorities: files that the environment names, never a URL."""

import base64
import contextlib
import ipaddress
import netrc
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

from rackrun.errors import UsageError

CREDENTIALS = "RACKRUN_CREDENTIALS"  # a file of one line, user:password; else ~/.netrc
AUTHORITY = "RACKRUN_CA"  # the certificate of the server's authority, if not one of the system's
CERTIFICATE = "RACKRUN_CERTIFICATE"  # our own certificate, for a server that asks for one
KEY = "RACKRUN_KEY"  # its private key


def context() -> ssl.SSLContext:
    """Return a TLS context with the named authority and client certificate, if any."""
    with _file_of(AUTHORITY):
        made = ssl.create_default_context(cafile=os.environ.get(AUTHORITY))
    if CERTIFICATE in os.environ:
        with _file_of(CERTIFICATE):
            made.load_cert_chain(os.environ[CERTIFICATE], os.environ.get(KEY))
    return made


def authorization(host: str, tls: bool) -> dict[str, str]:
    """Return the Authorization header, if any; UsageError for a password in the clear."""
    secret = _named_secret() or _secret_of_netrc(host)
    if not secret:
        return {}
    if not tls and not _loopback(host):
        raise UsageError(f"http://{host}: the password would cross the network in the clear")
    return {"Authorization": f"Basic {base64.b64encode(secret.encode()).decode()}"}


def _named_secret() -> str:
    if CREDENTIALS not in os.environ:
        return ""
    with _file_of(CREDENTIALS):
        secret = Path(os.environ[CREDENTIALS]).read_text().strip()
    if ":" not in secret or "\n" in secret:
        raise UsageError(f"{os.environ[CREDENTIALS]}: must hold one line, user:password")
    return secret


def _secret_of_netrc(host: str) -> str:
    try:
        found = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    except FileNotFoundError:
        return ""
    except netrc.NetrcParseError as error:
        raise UsageError(f"{error.filename}: {error.msg}") from None
    return f"{found[0]}:{found[2]}" if found else ""


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def _file_of(variable: str) -> Iterator[None]:
    """Turn an OSError from a named file into a UsageError that names its variable."""
    try:
        yield
    except OSError as error:  # ssl.SSLError among them
        path = os.environ.get(variable, "")
        raise UsageError(f"{variable}={path}: {error.strerror or error}") from None
