"""What runs and was asked: the nginx processes of a folder, and the requests that one has had."""

import base64
import hashlib
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rackrun.nginx.serve import NginxServer, serving
from rackrun.nginx.site import Site
from tests.lab.certificates import Keys

LINE = re.compile(r'"[A-Z]+ (\S+) [^"]*" (\d+) (\d+) ')  # of nginx's own format


def nginx_of(folder: Path) -> list[int]:
    """Return the processes of native servers of a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            is_nginx = (process / "comm").read_text() == "nginx\n"
            if is_nginx and (process / "cwd").readlink() == folder.resolve():
                found.append(int(process.name))
    return sorted(found)


@dataclass(frozen=True)
class AccessLog:
    """The access log of native servers."""

    include: Path
    log: Path

    def site(self, folder: Path) -> Site:
        """Return a server that writes into the log."""
        return Site(folder, port=0, native=True, include=self.include)

    @property
    def requests(self) -> list[tuple[str, int, int]]:
        """Return path, status and bytes of the body of each request so far."""
        return [(m[1], int(m[2]), int(m[3])) for m in LINE.finditer(self.log.read_text())]


@contextmanager
def access_log() -> Iterator[AccessLog]:
    """Yield a log that any server may write to."""
    with open_folder() as folder:
        log = AccessLog(folder / "include", folder / "access.log")
        log.log.touch()
        log.log.chmod(0o666)
        log.include.write_text(f"access_log {log.log};\n")
        yield log


@contextmanager
def serving_with(folder: Path, lines: str, *files: Path) -> Iterator[NginxServer]:
    """Serve with lines of nginx's language; files that they name are copied to where it reads."""
    with open_folder() as copies:
        for file in files:
            shutil.copyfile(file, copies / file.name)
            lines = lines.replace(str(file), str(copies / file.name))
        (copies / "include").write_text(lines)
        site = Site(folder, port=0, native=True, include=copies / "include")
        with serving(site) as server:
            yield server


@contextmanager
def serving_tls(folder: Path, keys: Keys, lines: str = "", *files: Path) -> Iterator[str]:
    """Yield the URL of a server with TLS, and with more lines."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    lines += f"listen {address} ssl;\nssl_certificate {keys.certificate};\n"
    lines += f"ssl_certificate_key {keys.key};\n"
    with serving_with(folder, lines, keys.certificate, keys.key, keys.authority, *files):
        yield f"https://{address}/"


def hashed(secret: str) -> str:
    """Return the line user:password as nginx wants it in a file of users."""
    user, _, password = secret.strip().partition(":")
    digest = hashlib.sha1(password.encode(), usedforsecurity=False).digest()
    return f"{user}:{{SHA}}{base64.b64encode(digest).decode()}\n"


@contextmanager
def open_folder() -> Iterator[Path]:
    """Yield a folder outside pytest's, which is closed to nginx, as that is never root."""
    with tempfile.TemporaryDirectory(prefix="rackrun-test-") as top:
        Path(top).chmod(0o755)
        yield Path(top)
