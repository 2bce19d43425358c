"""Utilization of a host: CPU, memory, network, GPUs."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import shutil
import signal
from functools import partial
from typing import Any

from rackrun.launcher.remote.agent.frames import read_some
from rackrun.launcher.remote.gpus import FORMAT, number, slowed
from rackrun.launcher.remote.processes import spawn

NETWORK_DEVICES = "/proc/net/dev"
INFINIBAND = "/sys/class/infiniband"
INFINIBAND_WORD = 4  # bytes: the unit of its counters
GPU_QUERY = (
    "--query-gpu=index,utilization.gpu,memory.used,memory.total,"
    "temperature.gpu,power.draw,clocks_throttle_reasons.active"
)
GPU_LOOP = "--loop-ms=3000"


class UsageMeter:
    """Measures how busy the host is; counts are since the last measurement."""

    def __init__(self, interface: str = "") -> None:
        """Start the first measurement.

        `interface` is the network device that counts; empty: all but loopback.
        """
        self.interface = interface
        self.measured_at = 0.0
        self.idle, self.total = _cpu_times()
        self.received, self.sent = network_bytes(interface)
        self.gpus: dict[str, dict[str, Any]] = {}
        self.rest = b""

    def measure(self, now: float) -> dict[str, Any]:
        """Return CPU as a fraction of all cores, memory in bytes, network in bytes/s, and GPUs.

        CPU and network are means since the last time.
        """
        idle, total = _cpu_times()
        cpu = 1 - (idle - self.idle) / max(1, total - self.total)
        self.idle, self.total = idle, total
        memory_total, memory_free = memory()
        return {
            "cpu": round(min(max(0.0, cpu), 1.0), 3),  # the kernel's count of idle time may fall
            "memory": max(0, memory_total - memory_free),
            "memory_total": memory_total,
            **self._network(now),
            "gpus": [self.gpus[index] for index in sorted(self.gpus)],
        }

    def _network(self, now: float) -> dict[str, int]:
        """Return the bytes received and sent per second since the last time; 0 the first time."""
        seconds = now - self.measured_at if self.measured_at else math.inf
        received, sent = network_bytes(self.interface)
        counts = {"received": received - self.received, "sent": sent - self.sent}
        self.measured_at, self.received, self.sent = now, received, sent
        return {name: max(0, round(count / seconds)) for name, count in counts.items()}

    def watch_gpus(self, selector: selectors.BaseSelector) -> None:
        """Start an nvidia-smi that prints a line per GPU every few seconds, where there is one."""
        program = shutil.which("nvidia-smi")
        if program is None:
            return
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        null = os.open(os.devnull, os.O_RDWR)
        args, streams = [program, GPU_QUERY, FORMAT, GPU_LOOP], (null, writing, null)
        spawn(args, dict(os.environ), "/", streams, signal.SIGKILL)
        os.close(writing)
        os.close(null)
        selector.register(reading, selectors.EVENT_READ, partial(self._take_gpus, selector))

    def _take_gpus(self, selector: selectors.BaseSelector, descriptor: int) -> None:
        data = read_some(descriptor)
        if data == b"":
            selector.unregister(descriptor)
            os.close(descriptor)
        *lines, self.rest = (self.rest + (data or b"")).split(b"\n")
        for line in lines:
            index, *values = [field.strip() for field in line.decode("ascii", "replace").split(",")]
            if len(values) == 6 and all(text.isdigit() for text in (index, *values[:3])):
                busy, used, total = map(int, values[:3])
                self.gpus[index] = {
                    "busy": min(busy, 100),
                    "memory": used,
                    "memory_total": total,
                    "temperature": number(values[3]),
                    "power": number(values[4]),
                    "slowed": slowed(values[5]),
                }


def _cpu_times() -> tuple[int, int]:
    with open("/proc/stat", "rb") as file:
        times = [int(field) for field in file.readline().split()[1:9]]
    return times[3] + times[4], sum(times)


def memory() -> tuple[int, int]:
    """Return the bytes of memory in all, and those that a program could still get."""
    with open("/proc/meminfo", "rb") as file:
        sizes = {line.split()[0]: int(line.split()[1]) for line in file}
    return sizes[b"MemTotal:"] << 10, sizes.get(b"MemAvailable:", sizes[b"MemFree:"]) << 10


def network_bytes(interface: str, devices: str = NETWORK_DEVICES) -> tuple[int, int]:
    """Return the bytes received and sent since boot by a network device, or by all but loopback.

    What InfiniBand and RoCE carry past the kernel is added.
    """
    received, sent = infiniband_bytes()
    with contextlib.suppress(OSError), open(devices) as file:
        for line in file:
            name, colon, counts = line.partition(":")
            name = name.strip()
            if colon and (name == interface if interface else name != "lo"):
                fields = counts.split()
                received, sent = received + int(fields[0]), sent + int(fields[8])
    return received, sent


def infiniband_bytes(root: str = INFINIBAND) -> tuple[int, int]:
    """Return the bytes received and sent since boot by all InfiniBand and RoCE ports."""
    counters = {"port_rcv_data": 0, "port_xmit_data": 0}
    with contextlib.suppress(OSError):
        for device in os.listdir(root):
            ports = os.path.join(root, device, "ports")
            for port in os.listdir(ports):
                for name in counters:
                    with open(os.path.join(ports, port, "counters", name)) as file:
                        counters[name] += int(file.read())
    return counters["port_rcv_data"] * INFINIBAND_WORD, counters["port_xmit_data"] * INFINIBAND_WORD
