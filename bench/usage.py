"""CPU time and memory of processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import psutil


def cpu_seconds(*pids: int) -> list[float]:
    """Return the CPU seconds of each process so far, its children left out; 0 if it has ended."""
    seconds = [0.0] * len(pids)
    for number, pid in enumerate(pids):
        with suppress(psutil.Error):
            seconds[number] = sum(psutil.Process(pid).cpu_times()[:2])
    return seconds


def family_cpu_seconds() -> float:
    """Return the CPU seconds of this process and all that descend from it, ended ones included."""
    seconds = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.Error):
            seconds += sum(process.cpu_times()[:4])
    return seconds


class PeakMemory:
    """The most megabytes that a measurement returns while a block lasts, sampled by a thread."""

    def __init__(self, measure: Callable[[], float], every_seconds: float) -> None:
        self.mb = 0.0
        self._measure, self._every_seconds = measure, every_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> PeakMemory:
        self.mb = self._measure()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(self._every_seconds):
            self.mb = max(self.mb, self._measure())


def resident_mb() -> float:
    """Return the memory of this process, with what it shares with others."""
    return float(psutil.Process().memory_info().rss / 1e6)


def children_mb() -> float:
    """Return the memory of all children together; a shared page is divided among its processes."""
    megabytes = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            megabytes += child.memory_full_info().pss / 1e6
    return megabytes
