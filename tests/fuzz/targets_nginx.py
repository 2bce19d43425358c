"""Fuzz targets: nginx's log and a server's record give a value or a Problem."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rackrun.nginx.logs import ServerTraffic, request_of
from rackrun.nginx.registry import RecordError, read
from rackrun.shapes import Misshapen

NAME = "rackrun-nginx-0badcafe-8080"


def fuzz_nginx_log_line(data: bytes) -> None:
    """Fuzz a line of the access log, by itself."""
    with contextlib.suppress(Misshapen):
        request = request_of(data)
        assert request.bytes >= 0


def fuzz_nginx_log(data: bytes) -> None:
    """Fuzz a whole access log: its lines are counted, whatever they hold."""
    with server_folder() as home:
        (home / "access.log").write_bytes(data)
        traffic = ServerTraffic(home / "access.log")
        traffic.update()
    assert traffic.requests == data.count(b"\n")


def fuzz_nginx_record(data: bytes) -> None:
    """Fuzz the record of a server, from which `stop` ends processes and removes folders."""
    with server_folder() as home, contextlib.suppress(RecordError):
        (home / "record.json").write_bytes(data)
        record = read(home)
        assert record and record.name == NAME and record.process.pid >= 0


@contextlib.contextmanager
def server_folder() -> Iterator[Path]:
    """Yield the folder of a server, which no other process uses: workers of pytest are forks."""
    with tempfile.TemporaryDirectory(prefix="rackrun-fuzz-") as folder:
        home = Path(folder, NAME)
        home.mkdir()
        yield home
