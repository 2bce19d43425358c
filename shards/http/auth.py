"""Credentials and trusted authorities: files that the environment names, never a URL."""

import base64
import contextlib
import ipaddress
import netrc
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

from rackrun.contract import variables
from rackrun.errors import UsageError


def context() -> ssl.SSLContext:
    """Return a TLS context with the named authority and client certificate, if any."""
    with _file_of(variables.AUTHORITY):
        made = ssl.create_default_context(cafile=os.environ.get(variables.AUTHORITY))
    if variables.CERTIFICATE in os.environ:
        with _file_of(variables.CERTIFICATE):
            made.load_cert_chain(os.environ[variables.CERTIFICATE], os.environ.get(variables.KEY))
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
    if variables.CREDENTIALS not in os.environ:
        return ""
    with _file_of(variables.CREDENTIALS):
        secret = Path(os.environ[variables.CREDENTIALS]).read_text(encoding="utf-8").strip()
    if ":" not in secret or "\n" in secret:
        raise UsageError(f"{os.environ[variables.CREDENTIALS]}: must hold one line, user:password")
    return secret


def _secret_of_netrc(host: str) -> str:
    try:
        credentials = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    except FileNotFoundError as error:
        if "NETRC" in os.environ:
            raise UsageError(f"NETRC={os.environ['NETRC']}: {error.strerror}") from None
        return ""
    except (OSError, UnicodeDecodeError) as error:
        path = os.environ.get("NETRC", "~/.netrc")
        raise UsageError(f"NETRC={path}: {_why(error)}") from None
    except netrc.NetrcParseError as error:
        raise UsageError(f"{error.filename}: {error.msg}") from None
    return f"{credentials[0]}:{credentials[2]}" if credentials else ""


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def _file_of(variable: str) -> Iterator[None]:
    """Turn an error from a named file into a UsageError that names its variable."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:  # ssl.SSLError among them
        raise UsageError(f"{variable}={os.environ.get(variable, '')}: {_why(error)}") from None


def _why(error: OSError | UnicodeDecodeError) -> str:
    """Return why a file cannot be used, in a few words."""
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
