"""Which GPUs a build of torch can use: by the driver's version and the compute capability.

driver >= 580    CUDA 13.x        NVIDIA's minimum for any minor version of a CUDA release
driver >= 525    CUDA 12.x        (docs.nvidia.com/deploy/cuda-compatibility)
driver >= 450    CUDA 11.x
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

BUILDS = ((580, 13, "cu130"), (525, 12, "cu126"), (450, 11, "cu118"))
"""Oldest driver, CUDA release that it runs, a build of torch for that; the newest first."""
DRIVER = Path("/proc/driver/nvidia/version")


def gpu_problem(torch: str, cuda: str, archs: str, driver: str, capabilities: Iterable[str]) -> str:
    """Return why this torch cannot use the GPUs of a host, and what to install; "" if it can.

    `archs` are its architectures as torch lists them. What is not known is not held against it.
    """
    if not cuda:
        return f"torch {torch} is built without CUDA{_install(driver)}"
    release = _number(driver)
    oldest = next((old for old, major, _ in BUILDS if major == _number(cuda)), 0)
    if release and release < oldest:
        too_old = f"driver {driver} is too old for CUDA {cuda}, which needs {oldest} or newer"
        return f"{too_old}{_install(driver)}"
    for capability in sorted(set(capabilities)):
        if archs and re.fullmatch(r"\d+\.\d", capability) and not _runs(archs, capability):
            text = f"torch {torch} has no code for GPUs of compute capability {capability}"
            return f"{text} (only {archs}); install a build of torch that has"
    return ""


def driver_here() -> str:
    """Return the version of this machine's driver; "" where there is none."""
    try:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", DRIVER.read_text())
    except OSError:
        return ""
    return found[0] if found else ""


def _install(driver: str) -> str:
    """Return which build of torch to install for a driver."""
    release = _number(driver)
    if release and release < BUILDS[-1][0]:
        return "; install a newer driver"
    build = next((build for old, _, build in BUILDS if not release or release >= old), "")
    also = "or a newer driver, " if driver and release < BUILDS[0][0] else ""
    index = f"https://download.pytorch.org/whl/{build}"
    return f"; install {also}a build for this driver: pip install torch --index-url {index}"


def _runs(archs: str, capability: str) -> bool:
    """Return True if code for one of these architectures runs on a GPU.

    Binaries run on later GPUs of the same major number, intermediate code on all later ones.
    """
    major, minor = map(int, capability.split("."))
    for kind, number in re.findall(r"(sm|compute)_(\d+)", archs):
        has_major, has_minor = divmod(int(number), 10)
        is_later = (major, minor) >= (has_major, has_minor)
        if is_later and (kind == "compute" or major == has_major):
            return True
    return False


def _number(version: str) -> int:
    """Return the first number of a version; 0 when there is none."""
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0
