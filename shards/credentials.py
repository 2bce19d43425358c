"""How readers authenticate to a shard server, and which servers they trust.

Passwords, certificates and authorities are files that the environment names, never a part of a URL.
"""

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


def tls_context() -> ssl.SSLContext:
    """Return a TLS context with the named authority and client certificate, if any."""
    with _named_file(variables.AUTHORITY):
        context = ssl.create_default_context(cafile=os.environ.get(variables.AUTHORITY))
    if variables.CERTIFICATE in os.environ:
        with _named_file(variables.CERTIFICATE) as path:
            context.load_cert_chain(path, os.environ.get(variables.KEY), _no_passphrase)
    return context


def _no_passphrase() -> str:  # OpenSSL would ask for it, on every host
    raise UsageError(
        f"{variables.KEY}: the key has a passphrase, for which nothing asks; name a key without"
        " one: openssl pkey -in KEY -out FILE"
    )


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
        raise UsageError(f"http://{host}: the password would cross the network unencrypted")
    return {"Authorization": f"Basic {base64.b64encode(secret.encode()).decode()}"}


def _secret_of_netrc(host: str) -> str:
    with _named_file("NETRC", "~/.netrc"):
        try:
            # Not its `default`, which is meant for others, as anonymous FTP.
            credentials = netrc.netrc(os.environ.get("NETRC")).hosts.get(host)
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
