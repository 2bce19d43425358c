"""A shard server that is killed restarts, until the run is over."""

import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rackrun.errors import Problem
from rackrun.launcher.lifecycle.serving import RestartingServer
from rackrun.nginx.site import Site
from tests.lab.data import write_tiny
from tests.lab.servers import nginx_of, open_folder
from tests.lab.waiting import until


def manifest(url: str) -> bytes | None:
    """Return the server's answer; None when no server listens."""
    try:
        with urllib.request.urlopen(f"{url}dataset.json", timeout=10) as reply:
            return bytes(reply.read())
    except OSError:
        return None


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a shard folder that nginx may read."""
    with open_folder() as top:
        yield write_tiny(top / "shards").folder


def test_a_server_that_is_ended_is_started_again_at_its_port(folder):
    """SIGTERM, as a scheduler sends it to every process of a job; afterwards nothing is left."""
    with RestartingServer(Site(folder, port=0, native=True)) as server:
        assert manifest(server.url)
        for _ in range(2):
            before = set(nginx_of(folder))
            os.kill(min(before), signal.SIGTERM)
            until(lambda before=before: not before & set(nginx_of(folder)))
            until(lambda: manifest(server.url))
    assert manifest(server.url) is None
    assert not nginx_of(folder)


def test_a_folder_that_cannot_be_served_is_said_at_once(tmp_path):
    """The error of the first start is the caller's."""
    with pytest.raises(Problem), RestartingServer(Site(tmp_path, port=0, native=True)):
        raise AssertionError("served")
