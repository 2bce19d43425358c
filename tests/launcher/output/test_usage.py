"""The use of hosts: measured on this machine, and kept in a file that stays small."""

import json
import os
import selectors
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from rackrun.launcher.output import usage_log
from rackrun.launcher.output.usage_log import UsageLog
from rackrun.launcher.remote.agent import usage
from rackrun.launcher.remote.agent.usage import UsageMeter, infiniband_bytes, network_bytes
from rackrun.launcher.run.events import Gpu, Usage
from rackrun.run_report.folder import read_usage
from rackrun.shapes import shaped

SECOND = 3.0


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_long_run_has_a_small_file(tmp_path, monkeypatch):
    """Two hosts report 5,000 times each: a few hundred lines cover all of it evenly, as means."""
    monkeypatch.setattr(usage_log, "MOST_LINES", 300)
    path, moments = tmp_path / "usage.jsonl", 5000
    log = UsageLog(path, {0: "gpu01", 1: "gpu02"})
    for moment in range(moments):
        for node in (0, 1):
            gpus = (Gpu(100 * (moment % 2), 10, 80), Gpu(50, 20, 80))
            log.add(Usage(node, 0.5, 2 * moment, 10**6, gpus, 100, 200), moment * SECOND)
        log.write(moment * SECOND)
    log.write(0.0, everything=True)
    assert [vars(line) for line in read_usage(tmp_path)] == [
        {**line, "gpus": tuple(map(tuple, line["gpus"]))} for line in lines(path)
    ]
    result = [line for line in lines(path) if line["host"] == "gpu02"]
    assert 60 < len(result) <= 152
    assert result[0]["time"] == 0
    steps = {b["time"] - a["time"] for a, b in zip(result[:-2], result[1:-1], strict=True)}
    assert max(steps) <= 2 * moments * SECOND / len(result)
    middle = result[len(result) // 2]
    assert abs(middle["gpus"][0][0] - 50) <= 2
    assert middle["gpus"][1] == [50, 20, 80]
    assert (middle["cpu"], middle["received"], middle["sent"]) == (0.5, 100, 200)
    assert middle["memory"] == pytest.approx(2 * middle["time"] / SECOND, rel=0.1)


def test_a_full_disk_does_not_end_the_run(tmp_path):
    """Where the file cannot be written nothing is raised, and nothing gathers in memory."""
    log = UsageLog(tmp_path / "missing" / "usage.jsonl", {0: "gpu01"})
    for moment in range(4):
        log.add(Usage(0, 0.5, 1, 2), moment * SECOND)
        log.write(moment * SECOND, everything=True)
    assert not log.waiting


SMI = """\
#!/bin/sh
echo '0, 97, 30000, 80000, 91, 689.52, 0x0000000000000060'
echo '[Unknown Error], 0, 10, 80000'
echo '1, 0, 10, 80000, [N/A], [Not Supported], [Unknown Error]'
echo '2, [N/A], 10, 80000, 40, 70.00, 0x0000000000000001'
exec sleep 60
"""
HOT = {"busy": 97, "memory": 30000, "memory_total": 80000}
HOT |= {"temperature": 91, "power": 689, "slowed": "heat"}
COLD = {"busy": 0, "memory": 10, "memory_total": 80000, "temperature": 0, "power": 0, "slowed": ""}


def test_heat_and_power_of_gpus(tmp_path, monkeypatch):
    """With what slows them down; what a driver does not know counts as nothing."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    meter = UsageMeter(1.0, "lo")
    spawned = usage.spawn
    started: list[int] = []

    def spawn(*words: Any) -> int:
        started.append(spawned(*words))
        return started[-1]

    monkeypatch.setattr(usage, "spawn", spawn)
    with selectors.DefaultSelector() as selector:
        meter.watch_gpus(selector)
        while len(meter.gpus) < 2:
            for key, _ in selector.select(10):
                key.data(key.fd)
    (pid,) = started
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert meter.measure(1.0)["gpus"] == [HOT, COLD]
    shaped({"node": 0, **meter.measure(2.0)}, Usage)


INFINITE = b"""\
{"host": "gpu01", "time": 0, "gpus": [], "cpu": 0, "memory": Infinity, "received": 0, "sent": 0}
"""


@pytest.mark.parametrize(
    "text",
    [
        *(b"mine\n", b"5\n", b"{}\n", b'{"host": "gpu01"}\n', b"\xff\n"),
        b"[" * 100_000 + b"\n",
        INFINITE,
    ],
    ids=range(7),
)
def test_what_a_rank_writes_to_the_file_ends_no_run(text, tmp_path, monkeypatch):
    """The folder is the ranks' as well; the file is left as it is then."""
    monkeypatch.setattr(usage_log, "MOST_LINES", 4)
    monkeypatch.setattr(usage_log, "FEWEST_LINES", 1)
    path = tmp_path / "usage.jsonl"
    path.write_bytes(text)
    log = UsageLog(path, {0: "gpu01"})
    for moment in range(20):
        log.add(Usage(0, 0.5, 1, 2), moment * SECOND)
        log.write(moment * SECOND, everything=True)
    assert path.read_bytes().startswith(text)
    assert log.refused and not log.waiting


def test_a_file_that_ranks_let_grow_is_not_read(tmp_path, monkeypatch):
    """To join its lines, the launcher would hold all of it."""
    monkeypatch.setattr(usage_log, "MOST_LINES", 4)
    monkeypatch.setattr(usage_log, "FEWEST_LINES", 1)
    path = tmp_path / "usage.jsonl"
    path.touch()
    os.truncate(path, 1 << 40)  # of zeros, which take no space
    log = UsageLog(path, {0: "gpu01"})
    for moment in range(20):
        log.add(Usage(0, 0.5, 1, 2), moment * SECOND)
        log.write(moment * SECOND, everything=True)
    assert log.refused and not log.waiting


def test_traffic_on_a_device_is_measured():
    """Bytes sent over loopback show on `lo`, in both directions, per second."""
    meter = UsageMeter(1.0, "lo")
    assert meter.measure(1.0)["received"] == 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        local = socket.create_connection(server.getsockname())
        remote, _ = server.accept()
        sender = threading.Thread(target=local.sendall, args=(b"x" * 10**6,))
        sender.start()
        got = 0
        while got < 10**6:
            got += len(remote.recv(1 << 16))
        sender.join()
        local.close()
        remote.close()
    observed = meter.measure(3.0)
    assert min(observed["received"], observed["sent"]) >= 500_000


def test_devices_are_distinguished(tmp_path):
    """A named device counts alone, no name means all but loopback; a damaged table is nothing."""
    table = tmp_path / "dev"
    row = "{}: {} 0 0 0 0 0 0 0 {} 0 0 0 0 0 0 0\n"
    rows = (row.format(*device) for device in (("   lo", 5, 5), (" eth0", 10, 20), ("ib0", 1, 2)))
    table.write_text("Inter-| Receive\n face |bytes\n" + "".join(rows))
    assert network_bytes("eth0", str(table)) == (10, 20)
    assert network_bytes("", str(table)) == (11, 22)
    assert network_bytes("", str(tmp_path / "none")) == (0, 0)


def test_what_goes_past_the_kernel_counts(tmp_path):
    """InfiniBand counts in words of four bytes, port by port."""
    for port, received in (("1", "10"), ("2", "5")):
        counters = tmp_path / "mlx5_0" / "ports" / port / "counters"
        counters.mkdir(parents=True)
        (counters / "port_rcv_data").write_text(f"{received}\n")
        (counters / "port_xmit_data").write_text("7\n")
    assert infiniband_bytes(str(tmp_path)) == (60, 56)
