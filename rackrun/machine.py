"""Facts about this machine that several packages need."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from pathlib import Path

from rackrun.contract.cores import cores

DEVICES = Path("/sys/bus/pci/devices")
BOOT = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def core_count() -> int:
    """Return the number of CPU cores that this process may use, even if it is bound to some."""
    return cores()


def why_no_compiler() -> str:
    """Return why torch.compile finds no C++ compiler here, and what to type; empty if it does."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler.partition(" ")[0]):
        return ""
    return (
        f"--compile needs a C++ compiler, and there is no {compiler!r};"
        " type sudo apt-get install g++ python3-dev, or leave --compile out"
    )


def typed_folder() -> Path:
    """Return the current folder by the name it was entered with, which may contain links.

    Another machine may have it by that name only, as where an automounter or a home is linked.
    """
    typed = Path(os.environ.get("PWD", ""))
    with contextlib.suppress(OSError):
        if typed.is_absolute() and typed.samefile(Path.cwd()):
            return typed
    return Path.cwd()


@functools.cache
def boot_id() -> str:
    """Return the kernel's UUID of this boot; empty if there is none."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


def bind_near(device: str, devices: Path = DEVICES) -> bool:
    """Bind this thread, and what it starts, to the cores closest to a PCI device.

    Return False if the kernel knows no such device, or if all cores are equally close.
    """
    if not device:
        return False
    core_count()  # of all cores: the rest is for the ranks of other GPUs
    try:
        allowed = os.sched_getaffinity(0)
        spans = (devices / device / "local_cpulist").read_text().strip().split(",")
        near = set()
        for span in filter(None, spans):  # 0-15,32-47
            low, _, high = span.partition("-")
            near |= allowed & set(range(int(low), int(high or low) + 1))
        if not near or near == allowed:
            return False
        os.sched_setaffinity(0, near)
    except (OSError, ValueError, AttributeError):
        return False
    return True
