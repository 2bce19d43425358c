"""CPU time of processes."""

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
