"""The GPUs of a host: what one query of nvidia-smi reports, or how many of AMD's there are."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from rackrun.launcher.remote.processes import names_in, run_program

KFD = "/dev/kfd"  # the driver of AMD's GPUs
KFD_NODES = "/sys/class/kfd/kfd/topology/nodes"
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
NONE_VISIBLE = ("", "-1", "NoDevFiles")

SECONDS = 30
FIELDS = (
    *("name", "memory.total", "memory.used", "temperature.gpu"),
    *("ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.active"),
    *("driver_version", "compute_cap"),
)
"""What is asked of each GPU. The reasons have their older name, which newer drivers accept as well;
drivers before 510 refuse the last field."""
FORMAT = "--format=csv,noheader,nounits"
SLOWED = ((0x60, "heat"), (0x80, "power"), (0x08, "hardware"))
"""Bits of the reasons for low clocks, without idleness and limits that were set."""


def visible_gpus(environment: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that these variables leave to ranks, by number or UUID; None: all."""
    for name in VISIBLE:
        if name in environment:
            named = [one.strip() for one in environment[name].split(",")]
            # CUDA reads up to the first one that is none, such as -1 and NoDevFiles
            return list(itertools.takewhile(lambda one: one not in NONE_VISIBLE, named))
    return None


def gpu_count() -> int:
    """Return the number of GPUs; AMD's count where their tools are installed."""
    count = len([name for name in os.listdir("/dev") if is_gpu(name)])
    if count or not os.path.exists(KFD) or shutil.which("rocm-smi") is None:
        return count
    for path in (os.path.join(KFD_NODES, name, "gpu_id") for name in names_in(KFD_NODES)):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            count += int(file.read()) > 0  # nodes without a GPU are CPUs
    return count


def gpus_of_ranks(given: Mapping[str, str]) -> int:
    """Return how many GPUs these variables, over those of this process, leave to ranks here."""
    count, visible = gpu_count(), visible_gpus({**os.environ, **given})
    return count if visible is None or not count else len(visible)


def is_gpu(name: str) -> bool:
    """Return True for the device of one NVIDIA GPU, False for one that all GPUs share."""
    return name.startswith("nvidia") and name[6:].isdigit()


def gpus() -> dict[str, Any]:
    """Return model, memory and health of every GPU, or the problem that nvidia-smi has."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"gpus": []}
    try:
        result = run_program([program, f"--query-gpu={','.join(FIELDS)}", FORMAT], SECONDS)
        if result.returncode and b"compute_cap" in result.stdout:
            query = f"--query-gpu={','.join(FIELDS[:-1])}"
            result = run_program([program, query, FORMAT], SECONDS)
    except OSError as error:
        return {"gpus": [], "problem": f"nvidia-smi: {error.strerror}"}
    except subprocess.TimeoutExpired:
        return {"gpus": [], "problem": f"nvidia-smi does not answer within {SECONDS} s"}
    out, errors = (text.decode(errors="replace").strip() for text in (result.stdout, result.stderr))
    lines = [line.strip() for line in out.splitlines() if line.strip()]
    rows = [[field.strip() for field in line.split(",")] for line in lines]
    if result.returncode or any(len(row) < len(FIELDS) - 1 for row in rows):
        complaint = next(iter([*errors.splitlines()[-1:], *lines]), "")
        complaint = complaint or f"exit code {result.returncode}"
        return {"gpus": [], "problem": f"nvidia-smi: {complaint}"}
    return {
        "gpus": [_described(row) for row in rows],
        "driver": rows[0][6] if rows else "",
        "capabilities": [row[7] for row in rows if re.fullmatch(r"\d+\.\d", row[-1])],
    }


def _described(row: list[str]) -> dict[str, Any]:
    name, total, used, temperature, uncorrected, reasons = row[:6]
    return {
        "name": name,
        "total": number(total),
        "used": number(used),
        "temperature": number(temperature),
        "uncorrected": number(uncorrected),
        "slowed": slowed(reasons),
    }


def number(text: str) -> int:
    """Return a number, rounded down; 0 for `[N/A]` and the like."""
    match = re.match(r"\d{1,9}", text)
    return int(match[0]) if match else 0


def slowed(reasons: str) -> str:
    """Return what slows a GPU down, by a bit mask such as 0x0000000000000020; "" for nothing."""
    mask = int(reasons, 16) if re.fullmatch("0x[0-9a-fA-F]{1,16}", reasons) else 0
    return next((reason for bits, reason in SLOWED if mask & bits), "")
