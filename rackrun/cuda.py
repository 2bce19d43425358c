"""Which GPUs a build of torch can use: by the driver's version and the compute capability.

rackrun needs torch 2.13. Of the builds that there are since, these are the ones to install:

index    driver    GPUs                    torch
cu130    >= 580    7.5 (Turing) or newer   2.13 or newer
cu126    >= 525    5.0 (Maxwell) to 9.0    2.13 and 2.14: with it, support for Volta (V100) and
                                           older ends (github.com/pytorch/pytorch/issues/190385)

No driver before 525 has one: builds for CUDA 11 end with torch 2.7 (.../issues/147383).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

Capability = tuple[int, int]


class Build(NamedTuple):
    """An index of builds: its name, the oldest driver, the GPUs, and what to install from it."""

    name: str
    driver: int
    oldest: Capability
    newest: Capability
    packages: str


BUILDS = (
    Build("cu130", 580, (7, 5), (99, 0), "torch torchvision"),
    Build("cu126", 525, (5, 0), (9, 0), "'torch<2.15' torchvision"),
)
"""The newest first."""
OLDEST_DRIVERS = {13: 580, 12: 525, 11: 450}
"""By CUDA release, for any minor version of it (docs.nvidia.com/deploy/cuda-compatibility)."""
DRIVER = Path("/proc/driver/nvidia/version")


def gpu_problem(
    torch: str, cuda: str, archs: str, driver: str, capabilities: Collection[str]
) -> str:
    """Return why this torch cannot use the GPUs of a host, and what to install; "" if it can.

    `archs` are its architectures as torch lists them. What is not known is not held against it.
    """
    known = sorted({_capability(one) for one in capabilities if re.fullmatch(r"\d+\.\d", one)})
    if not cuda:
        is_for_amd = "rocm" in torch
        return "" if is_for_amd else f"torch {torch} is built without CUDA{_install(driver, known)}"
    release, oldest = _number(driver), OLDEST_DRIVERS.get(_number(cuda), 0)
    if release and release < oldest:
        too_old = f"driver {driver} is too old for CUDA {cuda}, which needs {oldest} or newer"
        return f"{too_old}{_install(driver, known)}"
    for capability in known:
        if archs and not _runs(archs, capability):
            number = ".".join(map(str, capability))
            text = f"torch {torch} has no code for GPUs of compute capability {number}"
            return f"{text} (only {archs}){_install(driver, known)}"
    return ""


def driver_here() -> str:
    """Return the version of this machine's driver; "" where there is none."""
    try:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", DRIVER.read_text())
    except OSError:
        return ""
    return found[0] if found else ""


def _install(driver: str, capabilities: Collection[Capability]) -> str:
    """Return which build of torch to install for a driver and all GPUs of a host."""
    fit = [
        build
        for build in BUILDS
        if all(build.oldest <= capability <= build.newest for capability in capabilities)
    ]
    if not fit:
        return "; no build of torch since 2.13 has code for all GPUs here"
    release = _number(driver)
    build = next((build for build in fit if not release or release >= build.driver), None)
    if build is None:
        return f"; install driver {fit[-1].driver} or newer"
    also = "a newer driver, or " if release and build is not fit[0] else ""
    index = f"https://download.pytorch.org/whl/{build.name}"
    text = f"a build for this driver and GPU: pip install {build.packages} --index-url {index}"
    return f"; install {also}{text}"


def _runs(archs: str, capability: Capability) -> bool:
    """Return True if code for one of these architectures runs on a GPU.

    Binaries run on later GPUs of the same major number, intermediate code on all later ones.
    """
    for kind, number in re.findall(r"(sm|compute)_(\d+)", archs):
        has = divmod(int(number), 10)
        if capability >= has and (kind == "compute" or capability[0] == has[0]):
            return True
    return False


def _capability(text: str) -> Capability:
    major, minor = map(int, text.split("."))
    return major, minor


def _number(version: str) -> int:
    """Return the first number of a version; 0 when there is none."""
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0
