"""NVIDIA's GPUs of this machine: who has them open, and what nvidia-smi's XML says."""

import subprocess
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

from tests.lab.hosts import processes_with

SLOWED = {"hw_thermal": "heat", "sw_thermal": "heat", "power_brake": "power", "hw_slow": "hardware"}
"""Reasons for low clocks by parts of their names in the XML, in the order of a check."""


def open_by(run_id: str) -> set[int]:
    """Return the processes of a run that have a GPU open."""
    return {pid for pid in processes_with(f"RACKRUN_RUN_ID={run_id}") if _has_gpu_open(pid)}


def described() -> tuple[str, list[dict[str, str | int]]]:
    """Return the version of the driver, and each GPU by the names of `rack --json`."""
    smi = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, check=True, text=True)
    report = ElementTree.fromstring(smi.stdout)
    return report.findtext("driver_version", ""), [_described(gpu) for gpu in report.findall("gpu")]


def _described(gpu: ElementTree.Element) -> dict[str, str | int]:
    errors = [one for one in gpu.findall("ecc_errors/volatile//*") if "uncorr" in one.tag]
    active = [reason.tag for reason in gpu.iter() if reason.text == "Active"]
    reasons = [why for part, why in SLOWED.items() if any(part in name for name in active)]
    return {
        "name": gpu.findtext("product_name", ""),
        "total": _number(gpu.findtext("fb_memory_usage/total", "")),
        "temperature": _number(gpu.findtext("temperature/gpu_temp", "")),
        "uncorrected": sum(_number(one.text or "") for one in errors),
        "slowed": reasons[0] if reasons else "",
    }


def _number(text: str) -> int:
    first = text.split()[:1]
    return int(first[0]) if first and first[0].isdigit() else 0


def _has_gpu_open(pid: int) -> bool:
    with suppress(OSError):  # it has ended, or belongs to another account
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if descriptor.readlink().match("/dev/nvidia*"):
                    return True
    return False
