"""The probe on a host: unknown clients at its port, foreign locks, devices, dead disks."""

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rackrun.launcher.remote import interpreter, network, probe
from tests.lab.hosts import free_port
from tests.launcher.preflight.silent_disk import silent_disk

TOKEN = "0123456789abcdef"


@pytest.fixture
def port() -> Iterator[int]:
    """Yield a port for a probe to listen on."""
    yield network.listen("127.0.0.1", free_port("127.0.0.1"), TOKEN)["port"]
    network.release_port()


def reached(port: int, token: str = TOKEN) -> dict[str, Any]:
    return network.reach("127.0.0.1", port, token)


@pytest.mark.security("NET-5")
def test_unknown_clients_at_the_meeting_point_keep_no_host_out(port):
    """Silent ones, one that drips, and resets."""
    with contextlib.ExitStack() as clients:
        for _ in range(300):
            clients.enter_context(socket.create_connection(("127.0.0.1", port)))
        clients.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(b"x")
        with socket.create_connection(("127.0.0.1", port)) as rude:
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        began = time.monotonic()
        assert reached(port) == {}
        assert time.monotonic() - began < network.CONNECT_SECONDS  # one silent caller had been 5 s
        outcomes: list[dict[str, Any]] = []
        hosts = [threading.Thread(target=lambda: outcomes.append(reached(port))) for _ in range(64)]
        for host in hosts:
            host.start()
        for host in hosts:
            host.join()
        assert outcomes == [{}] * 64


def test_a_listener_of_another_launch_is_another_program(port):
    assert reached(port, "another") == {"error": network.STRANGER}


def test_a_launch_that_waits_keeps_no_port(port):
    """The run that holds the host may start again on it."""
    with pytest.raises(OSError), socket.create_server(("", port)):
        pass
    probe.unlock()
    socket.create_server(("", port)).close()


def test_a_silent_master_is_given_up_within_its_time():
    """A server that accepts and sends nothing, or a byte now and then."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            reached(listener.getsockname()[1])
        assert time.monotonic() - began < 3 * network.CONNECT_SECONDS


# -- devices


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


@pytest.mark.parametrize("prints", ["[]", "x", "[" * 100_000])
def test_an_interpreter_that_says_nothing_of_the_data_is_named(tmp_path, prints):
    """It may be anything that python= names; one without rackrun is refused for that."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{prints}'\n")
    python.chmod(0o755)
    reply = interpreter.shards("data", [str(python)], "/", False, {})
    assert reply == {"error": f"data: {python} gives no answer"}


def test_what_an_interpreter_says_of_itself_is_text_or_no_answer(tmp_path):
    """A wrapper may print anything."""
    for message in ("[]", '"x"', "{}", '{"version": 3}', "[" * 100_000):
        (tmp_path / "said").write_text(message)
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\ncat {tmp_path}/said\n")
        python.chmod(0o755)
        assert interpreter.describe([str(python)]) == {"error": f"{python}: no answer"}
    (tmp_path / "said").write_text(json.dumps({"version": 3, "torch": "", "cuda": None}))
    assert interpreter.describe([str(python)])["version"] == "3"
