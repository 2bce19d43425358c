"""A shard server as the preflight sees it, through the reader of the ranks on each host."""

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rackrun.launcher.remote import interpreter
from tests.lab.data import write_tiny
from tests.lab.waiting import until


class Server:
    """A server of given bytes by path, which records its requests."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.listener = socket.create_server((address, 0))
        self.url = f"http://{address}:{self.listener.getsockname()[1]}"
        self.asked: list[str] = []
        self.says: dict[str, bytes] = {}
        self.then: Callable[[socket.socket], object] = lambda caller: None
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                caller, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.answer, args=(caller,), daemon=True).start()

    def answer(self, caller: socket.socket) -> None:
        try:
            with caller:
                asked = caller.recv(1 << 16).decode()
                self.asked.append(asked)
                caller.sendall(self.says.get(asked.split()[1].rpartition("/")[2], b""))
                self.then(caller)
        except OSError:
            pass  # the client has closed the connection


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.listener.close()


def secret(folder: Path) -> dict[str, str]:
    (folder / "secret").write_text("reader:hunter2")
    return {"RACKRUN_CREDENTIALS": "secret"}


def asked(data: str, workdir: Path, environment: dict[str, str]) -> dict[str, object]:
    return interpreter.shards(data, [sys.executable], str(workdir), False, environment)


def test_a_relative_path_of_a_secret_is_one_of_the_working_directory(server, tmp_path):
    """As for the ranks, which are started there; what the server says wrong is a finding."""
    server.says["dataset.json"] = b"HTTP/1.1 404 Not \x1b[31m\r\nContent-Length: 0\r\n\r\n"
    result = asked(server.url, tmp_path, secret(tmp_path))
    assert set(result) == {"error"} and "404" in str(result["error"])
    assert "Authorization: Basic" in server.asked[0]


@pytest.mark.security("WEB-4")
def test_a_launch_names_the_host_whose_server_sends_it_elsewhere(start_lab, server, tmp_path):
    """WEB-4: through real sshd: 65, one line, and the other server has heard nothing."""
    lab = start_lab(1)
    other = Server("127.0.0.7")
    there = f"{other.url}/dataset.json"
    moved = f"HTTP/1.1 302 Found\r\nLocation: {there}\r\nContent-Length: 0\r\n\r\n"
    server.says["dataset.json"] = moved.encode()
    secret(tmp_path)
    env = f"RACKRUN_CREDENTIALS={tmp_path}/secret"
    code, _, err = lab.result_of("--env", env, lab.cheap_hosts(), "catdog", "--data", server.url)
    other.listener.close()
    assert code == 65, err
    (line,) = [line for line in err.splitlines() if "which is not followed" in line]
    assert line.startswith("error: 127.0.0.2: shards: ")
    until(lambda: bool(server.asked), "the first server is asked", 20)
    assert "Authorization: Basic" in server.asked[0]
    assert not other.asked


def test_check_reads_every_shard_and_a_launch_the_first(tmp_path):
    """A shard that is missing is found before hours of training, where that is asked for."""
    write_tiny(tmp_path / "data", shards=2)
    (tmp_path / "data" / "tiny-train-000001.tar").unlink()
    launch, check = (
        interpreter.shards("data", [sys.executable], str(tmp_path), every_shard, {})
        for every_shard in (False, True)
    )
    assert launch == {"dataset": "tiny", "splits": ["train"]}
    assert "tiny-train-000001.tar" in check["error"]


def test_a_host_whose_rackrun_lacks_the_reader_is_refused(tmp_path):
    """It would start ranks whose data nobody has looked at."""
    (tmp_path / "rackrun").mkdir()
    (tmp_path / "rackrun" / "__init__.py").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert interpreter.shards("data", [str(python)], "/", False, {}) == {"is_older": True}
