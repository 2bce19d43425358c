"""Which GPUs a build of torch can use: by the driver's version and the compute capability.

As a program, it prints the lock in requirements/ that fits the GPUs of this machine:

    python3 -P rackrun/cuda.py  ->  base

It needs the standard library only: launcher/venv.sh runs it before there is an environment.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

Capability = tuple[int, int]


class Build(NamedTuple):
    """A build of torch: the oldest driver, the GPUs, what to type after `pip install`, its lock."""

    driver: int
    oldest: Capability
    newest: Capability
    packages: str
    lock: str


INDEX = "--index-url https://download.pytorch.org/whl/"
BASE = "base"
BUILDS = (
    Build(580, (7, 5), (99, 0), f"torch torchvision {INDEX}cu130", BASE),
    Build(525, (7, 0), (12, 1), "'torch<2.11' torchvision", "cuda12"),
    Build(525, (5, 0), (9, 0), f"'torch<2.15' torchvision {INDEX}cu126", ""),
)
"""The newest first. From PyPI, torch 2.10 is the last for CUDA 12 and the last with code for 7.0
(V100); before 7.0 only an index of PyTorch's own has builds, up to 2.14
(github.com/pytorch/pytorch/issues/190385). For drivers before 525 there is none: builds for CUDA 11
end with torch 2.7 (.../issues/147383)."""
QUERY = "--query-gpu=driver_version,compute_cap", "--format=csv,noheader"
QUERY_SECONDS = 60
OLDEST_DRIVERS = {13: 580, 12: 525, 11: 450}
"""CUDA release, in any minor version -> driver (docs.nvidia.com/deploy/cuda-compatibility)."""
DRIVER = Path("/proc/driver/nvidia/version")


def gpu_problem(
    torch: str, cuda: str, archs: str, driver: str, capabilities: Collection[str]
) -> str:
    """Return why this torch cannot use the GPUs of a host, and what to install; "" if it can.

    `archs` are its architectures as torch lists them. What is not known is not held against it.
    """
    gpus = sorted({_capability(one) for one in capabilities if re.fullmatch(r"\d+\.\d", one)})
    if not cuda:
        is_for_amd = "rocm" in torch
        return "" if is_for_amd else f"torch {torch} is built without CUDA{_install(driver, gpus)}"
    release, oldest = _number(driver), OLDEST_DRIVERS.get(_number(cuda), 0)
    if release and release < oldest:
        too_old = f"driver {driver} is too old for CUDA {cuda}, which needs {oldest} or newer"
        return f"{too_old}{_install(driver, gpus)}"
    for capability in gpus:
        if archs and not _runs(archs, capability):
            number = ".".join(map(str, capability))
            text = f"torch {torch} has no code for GPUs of compute capability {number}"
            return f"{text} (only {archs}){_install(driver, gpus)}"
    return ""


def driver_here() -> str:
    """Return the version of this machine's driver; "" where there is none."""
    try:
        match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", DRIVER.read_text())
    except OSError:
        return ""
    return match[0] if match else ""


def _lock_here() -> str:
    """Return the lock for the driver and GPUs that nvidia-smi lists; the usual one if none fits."""
    try:
        args = ["nvidia-smi", *QUERY]
        asked = subprocess.run(
            args, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return BASE
    gpus = re.findall(r"^([\d.]+), *(\d+\.\d) *$", asked.stdout, re.MULTILINE)
    if not gpus:
        return BASE
    builds = _fitting([_capability(number) for _, number in gpus])
    return next((build.lock for build in _for_driver(gpus[0][0], builds) if build.lock), BASE)


def _fitting(capabilities: Collection[Capability]) -> list[Build]:
    return [
        build
        for build in BUILDS
        if all(build.oldest <= capability <= build.newest for capability in capabilities)
    ]


def _for_driver(driver: str, builds: Sequence[Build]) -> list[Build]:
    """Return the builds that a driver runs: all, where its version is not known."""
    release = _number(driver)
    return [build for build in builds if not release or release >= build.driver]


def _install(driver: str, capabilities: Collection[Capability]) -> str:
    fit = _fitting(capabilities)
    if not fit:
        return "; no build of torch since 2.10 has code for all GPUs here"
    builds = _for_driver(driver, fit)
    if not builds:
        return f"; install driver {fit[-1].driver} or newer"
    also = "a newer driver, or " if builds[0] is not fit[0] else ""
    return f"; install {also}a build for this driver and GPU: pip install {builds[0].packages}"


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
    match = re.match(r"\d+", version)
    return int(match[0]) if match else 0


if __name__ == "__main__":
    sys.stdout.write(f"{_lock_here()}\n")
