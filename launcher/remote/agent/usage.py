"""Utilization of a host: CPU, memory, GPUs."""

from __future__ import annotations

import contextlib

TYPE_CHECKING = False  # programs for hosts start sooner without typing
if TYPE_CHECKING:
    from typing import Any


class UsageMeter:
    """Measures every few seconds; what it counts is since the last time."""

    def __init__(self, every_seconds: float) -> None:
        """The first measurement starts now."""
        self.every_seconds = every_seconds
        self.next_at = 0.0
        self.idle, self.total = cpu_times()
        self.gpus: dict[str, dict[str, int]] = {}
        self.rest = b""

    def due(self, now: float) -> bool:
        """Return whether it is time to measure again."""
        return now >= self.next_at

    def measure(self, now: float) -> dict[str, Any]:
        """Return CPU as a fraction of all cores since the last time, memory in bytes, GPUs."""
        self.next_at = now + self.every_seconds
        idle, total = cpu_times()
        passed = max(1, total - self.total)
        cpu = 1 - (idle - self.idle) / passed
        self.idle, self.total = idle, total
        memory_total, memory_free = memory()
        return {
            "cpu": round(min(max(0.0, cpu), 1.0), 3),  # the kernel's count of idle time may fall
            "memory": max(0, memory_total - memory_free),
            "memory_total": memory_total,
            "gpus": [self.gpus[index] for index in sorted(self.gpus)],
        }

    def take_gpus(self, data: bytes) -> None:
        """Take lines of nvidia-smi: index, percent busy, MiB used, MiB in all."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            index, *values = [field.strip() for field in line.decode("ascii", "replace").split(",")]
            if len(values) == 3 and all(value.isdigit() for value in values):
                busy, used, total = map(int, values)
                self.gpus[index] = {"busy": min(busy, 100), "memory": used, "memory_total": total}


def cpu_times() -> tuple[int, int]:
    """Return idle and total time of all cores since boot, in ticks."""
    with open("/proc/stat", "rb") as file:
        times = [int(field) for field in file.readline().split()[1:9]]
    return times[3] + times[4], sum(times)


def memory() -> tuple[int, int]:
    """Return the bytes of memory in all, and those that a program could still get."""
    with open("/proc/meminfo", "rb") as file:
        sizes = {line.split()[0]: int(line.split()[1]) for line in file}
    return sizes[b"MemTotal:"] << 10, sizes.get(b"MemAvailable:", sizes[b"MemFree:"]) << 10


def oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory since boot."""
    with contextlib.suppress(OSError), open("/proc/vmstat", "rb") as file:
        for line in file:
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    return 0
