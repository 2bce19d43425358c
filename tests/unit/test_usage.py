"""The use of hosts: measured on this machine, and kept in a file that stays small."""

import itertools
import json
import os
import selectors
import signal
import socket
import threading
from pathlib import Path
from typing import Any

from rackrun.launcher.output import usage_log
from rackrun.launcher.output.usage_log import UsageLog
from rackrun.launcher.remote.agent import usage
from rackrun.launcher.remote.agent.usage import UsageMeter, infiniband_bytes, network_bytes
from rackrun.launcher.run.events import Gpu, Usage
from rackrun.run_report.folder import read_usage
from rackrun.shapes import shaped
from tests.unit.planned import plan_of

SECOND = 3.0


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def usage_log_of(path: Path, *hosts: str) -> UsageLog:
    log = UsageLog(path)
    log.begin(plan_of(*hosts))
    return log


def test_a_long_run_has_a_small_file(tmp_path, monkeypatch):
    """Two hosts report 5,000 times each: a few hundred lines cover all of it evenly."""
    monkeypatch.setattr(usage_log, "MOST_LINES", 300)
    path, moments = tmp_path / "usage.jsonl", 5000
    log = usage_log_of(path, "gpu01", "gpu02")
    for moment in range(moments):
        for node in (0, 1):
            gpus = (Gpu(100 * (moment % 2), 10, 80), Gpu(50, 20, 80))
            log.add(Usage(node, 0.5, 2 * moment, 10**6, gpus, 100, 200), moment * SECOND)
    assert [vars(line) for line in read_usage(tmp_path)] == [
        {**line, "gpus": tuple(map(tuple, line["gpus"]))} for line in lines(path)
    ]
    result = [line for line in lines(path) if line["host"] == "gpu02"]
    assert 60 < len(result) <= 152
    assert result[0]["time"] == 0
    (step,) = {b["time"] - a["time"] for a, b in itertools.pairwise(result)}
    assert step <= 2 * moments * SECOND / len(result)
    middle = result[len(result) // 2]
    assert middle["gpus"][1] == [50, 20, 80]
    assert (middle["cpu"], middle["received"], middle["sent"]) == (0.5, 100, 200)
    assert middle["memory"] == 2 * middle["time"] / SECOND


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
    meter = UsageMeter("lo")
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


def test_traffic_on_a_device_is_measured():
    """Bytes sent over loopback show on `lo`, in both directions, per second."""
    meter = UsageMeter("lo")
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
