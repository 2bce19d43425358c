"""The probe on a host: unknown clients at its port, dead disks, odd interpreters."""

import contextlib
import socket
import sys
import time
from collections.abc import Iterator

import pytest

from rackrun.launcher.remote import interpreter, network, probe
from tests.lab.hosts import free_port
from tests.launcher.preflight.silent_disk import silent_disk


@pytest.fixture
def port() -> Iterator[int]:
    """Yield a port for a probe to listen on."""
    yield network.listen("127.0.0.1", free_port("127.0.0.1"))["port"]
    network.release_port()


@pytest.mark.security("NET-5")
def test_unknown_clients_at_the_meeting_point_keep_no_host_out(port):
    """NET-5: 300 silent ones, and resets: hosts get through, and the port is free at once."""
    with contextlib.ExitStack() as clients:
        for _ in range(300):
            clients.enter_context(socket.create_connection(("127.0.0.1", port)))
        with socket.create_connection(("127.0.0.1", port)) as rude:
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        for _ in range(64):
            assert not network.route("127.0.0.1", "127.0.0.1", port)["unreached"]
    probe.unlock()
    socket.create_server(("", port)).close()


# -- disks


def test_a_host_whose_working_folder_does_not_answer_is_named_in_time(start_lab, tmp_path):
    """A file server that is gone: 69, named, the other host is fine, nothing was started."""
    lab = start_lab(2)
    with silent_disk(tmp_path / "gone") as folder:
        hosts = lab.cheap_hosts("", f"workdir={folder}/work")
        began = time.monotonic()
        code, _, err = lab.result_of(hosts, "--", "true")
        took = time.monotonic() - began
    assert code == 69, err
    assert f"127.0.0.3: reachable: cannot be probed: {folder}/work does not answer" in err
    assert "127.0.0.2" not in err
    assert probe.FOLDER_SECONDS <= took < 55


def test_shards_on_a_disk_that_does_not_answer_are_named_in_time(tmp_path, monkeypatch):
    """The folder of --data, or the file with the password."""
    monkeypatch.setattr(interpreter, "SHARDS_SECONDS", 1.0)
    with silent_disk(tmp_path / "gone") as folder:
        for data, environment in (
            (str(folder), {}),
            ("http://127.0.0.1:9", {"RACKRUN_CREDENTIALS": f"{folder}/secret"}),
        ):
            reply = interpreter.shards(data, [sys.executable], "/", False, environment)
            assert reply == {"error": f"{data}: does not answer in time"}
