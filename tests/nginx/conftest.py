"""A real Docker daemon, an nginx image made of this machine's nginx, and a folder to serve."""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.lab.servers import nginx_image


@pytest.fixture(scope="session")
def image(daemon: None) -> str:
    """Return an image of this machine's nginx."""
    return nginx_image()


LISTED = (
    *(f"cats-train-00000{number}.tar" for number in (0, 1, 2, 5, 8, 9)),
    *("9cats-train-000006.tar", "other.program_0.tar", f"{'long' * 50}.tar"),
)


def manifest_of(shards: Sequence[str], index: str) -> str:
    """Return as much of a manifest as a server reads."""
    return json.dumps({"splits": [{"shards": [{"name": name} for name in shards], "index": index}]})


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder that passes for shards, and files beside them that may not be served.

    Not under pytest's own folder, which is closed to the user that a root's nginx runs as.
    """
    top = Path(tempfile.mkdtemp(prefix="rackrun-test-"))
    path = top / "a folder, with 'quotes\""
    path.mkdir()
    (path / "dataset.json").write_text(manifest_of(LISTED, "cats-train.index.npy"))
    (path / "cats-train-000000.tar").write_bytes(bytes(range(256)) * 4096)
    (path / "cats-train-000001.tar").symlink_to("/etc/passwd")
    (path / "cats-train-000002.tar").mkdir()
    (path / ".cats-train-000003.tar.partial").write_bytes(b"not yet")
    (path / "cats-train.index.npy").write_bytes(b"\x93NUMPY")
    (path / "9cats-train-000006.tar").write_bytes(bytes(512))
    (path / "other.program_0.tar").write_bytes(bytes(512))
    (path / "cats-train-000004.tar").write_bytes(b"in no manifest")
    (path / "Cats-train-000000.tar").write_bytes(b"in no manifest")
    (path / "cats-train-000008.tar").touch(mode=0o000)
    (path / "dataset.v1.json").write_text("{}")
    (path / "report.json").write_text("{}")
    (path / "notes.txt").write_text("nobody's business")
    (top / "secret-train-000000.tar").write_text("outside the folder")
    for path_ in (top, path):
        path_.chmod(0o755)
    yield path
    shutil.rmtree(top)


def answer(address: str, port: int, request: bytes) -> bytes:
    """Send it; return all that comes back until the server hangs up."""
    with socket.create_connection((address, port), 10) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has heard enough
            connection.sendall(request)
        return _all(connection)


CLOSED = "closed"  # without an answer


def raw(
    line: str, *headers: str, host: str = "127.0.0.1", body: str = "", connection: str = "close"
) -> bytes:
    """Return the bytes of a request."""
    fields = [f"Host: {host}"] if host else []
    return "\r\n".join([line, *fields, f"Connection: {connection}", *headers, "", body]).encode()


def _all(connection: socket.socket) -> bytes:
    parts = []
    while True:
        try:
            part = connection.recv(1 << 20)
        except ConnectionResetError:
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)


def status(reply: bytes) -> str:
    """Return the status code of a reply, or CLOSED."""
    return reply.split(b" ", 2)[1].decode() if reply.startswith(b"HTTP/") else CLOSED


COMMAND = [sys.executable, "-m", "rackrun.nginx"]


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, args)], capture_output=True, text=True, check=False)
