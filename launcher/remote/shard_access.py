"""Check that a host can read the shards of a run: in a folder, or from a server."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

from rackrun.contract import variables
from rackrun.launcher.remote.waiting import within

CONNECT_SECONDS = 5.0
FOLDER_SECONDS = 10.0  # for a disk to answer; one that is gone never would
SHARDS_SECONDS = 30.0  # for a manifest and a shard; a server that drips would never end
SECRET_BYTES = 1 << 16
MANIFEST_BYTES = 1 << 26
NAME_LETTERS = 255
MOST_SPLITS = 16
MOST_MOVES = 5  # redirects, followed as by the ranks: on the same server only


def shards(
    data: str, workdir: str, every_shard: bool, environment: dict[str, str]
) -> dict[str, Any]:
    """Check that the manifest of a shard folder or server can be read here, and its shards."""
    head, _, digits = data.rpartition("@")
    if head and digits.isdigit() and not os.path.isdir(data):
        data = head  # DATA@2: the ranks check that version
    try:
        if not data.startswith(("http://", "https://")):
            folder = os.path.join(workdir, os.path.expanduser(data))
            return dict(within(FOLDER_SECONDS, lambda: _dataset_in(folder)))
        # The files that identify a reader, by variable; relative ones as the ranks find them. The
        # working directory stays: an interpreter that is started later must not import from there.
        settings = {**os.environ, **environment}
        files = {
            name: path and os.path.join(workdir, path)
            for name in variables.ACCESS
            if (path := settings.get(name)) is not None
        }
        seconds, base = SHARDS_SECONDS * (1 + 2 * every_shard), data.rstrip("/") + "/"
        return dict(within(seconds, lambda: _dataset_at(base, every_shard, files)))
    except FileNotFoundError as error:
        folder = os.path.dirname(str(error.filename))
        return {"error": f"no shards at {folder}"}
    except TimeoutError:
        return {"error": f"{data}: does not answer in time"}
    except Unfit as error:
        return {"error": str(error)}


class Unfit(Exception):
    """Raised for a server or a manifest that the ranks could not read, either."""


def _dataset_at(base: str, every_shard: bool, files: dict[str, str]) -> dict[str, Any]:
    reader = _reader_of(base, files)
    dataset, shards = names_in(fetch(reader, base + "dataset.json"), base)
    for shard in shards if every_shard else shards[:1]:
        fetch(reader, base + shard, first_byte=True)
    return dataset


def _dataset_in(folder: str) -> dict[str, Any]:
    with open(os.path.join(folder, "dataset.json"), "rb") as file:
        return names_in(file.read(MANIFEST_BYTES + 1), folder)[0]


def names_in(body: bytes, where: str) -> tuple[dict[str, Any], list[str]]:
    """Return the names of a data set and its splits, and of its shards.

    Raises Unfit for an invalid manifest.
    """
    try:
        if len(body) > MANIFEST_BYTES:
            raise ValueError
        manifest = json.loads(body)
        shards = [shard["name"] for split in manifest["splits"] for shard in split["shards"]]
        filled = [each.get("name", "") for each in manifest["splits"] if each["shards"]]
        if not all(isinstance(name, str) for name in (manifest["dataset"], *filled, *shards)):
            raise TypeError
    except (KeyError, TypeError, ValueError, RecursionError):
        raise Unfit(f"{where}: dataset.json is not a valid manifest") from None
    names = [name[:NAME_LETTERS] for name in filled[:MOST_SPLITS]]
    return {"dataset": manifest["dataset"][:NAME_LETTERS], "splits": names}, shards


def _reader_of(base: str, files: dict[str, str]) -> urllib.request.OpenerDirector:
    """Return a client that asks as the ranks will: without a proxy, with credentials from files.

    It has no handler for redirects, so that the password is sent to no other server.
    """
    with _named_file(variables.AUTHORITY, files):
        trust = ssl.create_default_context(cafile=files.get(variables.AUTHORITY))
    if variables.CERTIFICATE in files:
        with _named_file(variables.CERTIFICATE, files):
            trust.load_cert_chain(files[variables.CERTIFICATE], files.get(variables.KEY))
    reader = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(context=trust),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        reader.add_handler(handler)
    if variables.CREDENTIALS in files and is_private(base):
        secret = files[variables.CREDENTIALS]
        with _named_file(variables.CREDENTIALS, files), open(secret, "rb") as file:
            login = file.read(SECRET_BYTES).decode().strip().encode()  # the ranks read text
        reader.addheaders = [("Authorization", f"Basic {base64.b64encode(login).decode()}")]
    return reader


@contextlib.contextmanager
def _named_file(variable: str, files: dict[str, str]) -> Iterator[None]:
    """Raise Unfit with the variable and path of a file that cannot be used."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:  # ssl.SSLError among them
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else _reason_of(error)
        raise Unfit(f"{variable}={files.get(variable, '')}: {why}") from None


def is_private(url: str) -> bool:
    """Return True for a private connection: TLS, or a loopback address."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    is_loopback = host == "::1" or (host.startswith("127.") and host.replace(".", "").isdigit())
    return parts.scheme == "https" or is_loopback


def fetch(reader: urllib.request.OpenerDirector, url: str, first_byte: bool = False) -> bytes:
    """Return the body of a URL up to a limit, or its first byte; raise Unfit with the reason."""
    target = url
    headers = {"Range": "bytes=0-0"} if first_byte else {}
    for _ in range(MOST_MOVES + 1):
        try:
            request = urllib.request.Request(target, headers=headers)
            with reader.open(request, timeout=CONNECT_SECONDS) as reply:
                body: bytes = reply.read(1 if first_byte else MANIFEST_BYTES + 1)
                return body
        except urllib.error.HTTPError as error:
            with error:
                target = moved(target, error)
        except urllib.error.URLError as error:
            raise Unfit(f"{url}: {_reason_of(error.reason)}") from error
        except OSError as error:
            raise Unfit(f"{url}: {_reason_of(error)}") from error
        except (http.client.HTTPException, ValueError) as error:
            raise Unfit(f"{url}: does not answer in HTTP ({type(error).__name__})") from error
    raise Unfit(f"{url}: too many redirects")


def _reason_of(error: object) -> str:
    return str(getattr(error, "strerror", None) or error)


def moved(url: str, error: urllib.error.HTTPError) -> str:
    """Return the target of a redirect on the same server; raise Unfit for all other answers."""
    target = error.headers.get("Location", "")
    if error.code not in (301, 302, 303, 307, 308):
        raise Unfit(f"{url}: {error.code} {error.reason}") from error
    try:
        resolved = urllib.parse.urljoin(url, target)
        before, after = urllib.parse.urlsplit(url), urllib.parse.urlsplit(resolved)
    except ValueError:
        target = ""
    if not target or (before.scheme, before.netloc) != (after.scheme, after.netloc):
        raise Unfit(f"{url}: {error.code} to {target or 'nowhere'}, which is not followed")
    return resolved
