"""The GPUs of this machine, held against the torch of its ranks without a probe."""

from __future__ import annotations

from launcher.errors import PreflightRefused
from launcher.remote.probe import describe
from rackrun.cuda import driver_here, gpu_problem


def refuse_unusable_gpus(name: str, python: str, way_out: str) -> None:
    """Raise PreflightRefused where torch would leave the GPUs alone and train on the CPU.

    `way_out` is what to type where that is meant.
    """
    versions = describe([python])
    torch, cuda = versions.get("torch", ""), versions.get("cuda", "")
    if torch and (why := gpu_problem(torch, cuda, "", driver_here(), [])):
        raise PreflightRefused(f"{name}: {why}; {way_out}")
