"""Fuzz targets: nginx's log and a server's record give a value or a Problem."""

import atexit
import contextlib
import tempfile
from pathlib import Path

from nginx.errors import RecordError
from nginx.logs import Traffic, request_of
from nginx.registry import read
from rackrun.shapes import Misshapen

FOLDER = tempfile.TemporaryDirectory(prefix="rackrun-fuzz-")
atexit.register(FOLDER.cleanup)
HOME = Path(FOLDER.name) / "rackrun-nginx-0badcafe-8080"
HOME.mkdir()


def fuzz_nginx_log_line(data: bytes) -> None:
    """Fuzz a line of the access log, by itself."""
    with contextlib.suppress(Misshapen):
        request = request_of(data)
        assert request.bytes >= 0


def fuzz_nginx_log(data: bytes) -> None:
    """Fuzz a whole access log: its lines are counted, whatever they hold."""
    (HOME / "access.log").write_bytes(data)
    traffic = Traffic(HOME / "access.log")
    traffic.update()
    assert traffic.requests == data.count(b"\n")


def fuzz_nginx_record(data: bytes) -> None:
    """Fuzz the record of a server, from which `stop` ends processes and removes folders."""
    (HOME / "record.json").write_bytes(data)
    with contextlib.suppress(RecordError):
        record = read(HOME)
        assert record and record.name == HOME.name and record.process.pid >= 0
