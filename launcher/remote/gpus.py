"""The GPUs of a host: what nvidia-smi and the kernel's log report, or where AMD's are.

nvidia-smi prints all it knows about every GPU at once. What a driver or a GPU does not have is
missing, or N/A: it counts as nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from rackrun.launcher.remote.processes import names_in
from rackrun.launcher.remote.waiting import find_program, lines_of

HARDWARE_XIDS = (48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 121, 140, 149)
"""Errors that NVIDIA's catalog blames on memory, links, the bus or firmware, not on a program."""
SLOWED = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
"""Clocks below their limit for other reasons than idleness and the power limit that was set."""
KFD = "/dev/kfd"  # the driver of AMD's GPUs
KFD_NODES = "/sys/class/kfd/kfd/topology/nodes"
XID = r"\[ *(\d+)\.\d+\].*NVRM: Xid \((?:PCI:)?([0-9a-fA-F:]+)[.0-9]*\): (\d+)"
"""A line of the kernel's log; not compiled here, since every launch imports this module."""
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
NONE_VISIBLE = ("", "-1", "NoDevFiles")
CSV = "--format=csv,noheader,nounits"
REPAIRS_PENDING = ("remapped_row_pending", "pending_retirement")
MOST_XIDS = 16  # of a GPU, the newest


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
    if count or not os.path.exists(KFD) or find_program("rocm-smi") is None:
        return count
    for path in (os.path.join(KFD_NODES, name, "gpu_id") for name in names_in(KFD_NODES)):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            count += int(file.read()) > 0  # nodes without a GPU are CPUs
    return count


def is_gpu(name: str) -> bool:
    """Return True for the device of one NVIDIA GPU, False for one that all GPUs share."""
    return name.startswith("nvidia") and name[6:].isdigit()


def gpus(full: bool) -> dict[str, Any]:
    """Return model, memory and health of every GPU, and the processes that are on them now.

    `full`: also its NVLinks and its errors in the kernel's log.
    """
    program = find_program("nvidia-smi")
    if program is None:
        return {"gpus": [], "processes": []}
    text = "\n".join(lines_of(program, "-q", "-x"))
    parts = re.split(r"<gpu id=\"([^\"]*)\">", text)[1:]  # bus address, text, bus address, …
    described_gpus = [described(each) for each in parts[1::2]]
    if full:
        errors, links = xids(), _nvlinks(program)
        for number, gpu in enumerate(described_gpus):
            bus = parts[2 * number].lower()[4:-2]  # 00000000:3B:00.0, and 0000:3b:00 in the log
            gpu["xids"] = errors.get(bus, [])[-MOST_XIDS:]
            gpu["links"] = links.get(number, 0)
    pids = [
        int(match[1])
        for match in re.finditer(r"<pid>(\d+)</pid>.*?<type>([^<]*)<", text, re.DOTALL)
        if "C" in match[2]  # computes, and does not only draw
    ]
    return {
        "gpus": described_gpus,
        "driver": tag_text(text, "driver_version"),
        # drivers before 510 print none
        "capabilities": lines_of(program, "--query-gpu=compute_cap", CSV),
        "processes": [{"pid": pid, "name": name_of(pid)} for pid in dict.fromkeys(pids)],
    }


def described(text: str) -> dict[str, Any]:
    """Return the facts about one GPU in its part of what nvidia-smi prints."""
    memory, volatile = section(text, "fb_memory_usage"), section(text, "volatile")
    counts = re.findall(r"<\w*uncorrectable\w*>(\d+)<", volatile)
    older = re.findall(r"<total>(\d+)<", section(volatile, "double_bit"))
    reasons = re.findall(r"<clocks_(?:event|throttle)_reason_(\w+)>Active<", text)
    failed = tag_text(text, "remapped_row_failure") == "Yes"
    # Rows are remapped from Ampere on; before, whole pages were retired.
    pending = "Yes" in [tag_text(text, tag) for tag in REPAIRS_PENDING]
    return {
        "name": tag_text(text, "product_name"),
        "total": number(memory, "total"),
        "used": number(memory, "used"),
        "temperature": number(text, "gpu_temp"),
        "power": number(text, "(?:instant_|average_)?power_draw"),
        "power_limit": number(text, "(?:current_)?power_limit"),
        "uncorrected": sum(map(int, counts + older)),
        "remapping": "failed" if failed else "pending" if pending else "",
        "recovery": tag_text(text, "gpu_recovery_action").replace("None", ""),
        "slowed": [reason for reason in SLOWED if reason in reasons],
    }


def section(text: str, tag: str) -> str:
    """Return the text between the first such tag and its end."""
    match = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return match[1] if match else ""


def tag_text(text: str, tag: str) -> str:
    """Return the text of the first such tag; empty where there is none, or nothing known."""
    match = re.search(f"<{tag}>([^<]*)<", text)
    return match[1].strip() if match and "N/A" not in match[1] else ""


def number(text: str, tag: str) -> int:
    """Return the first such number, whatever its unit, rounded down; 0 where there is none."""
    match = re.search(rf"<{tag}>(\d+)", text)
    return int(match[1]) if match else 0


def _nvlinks(program: str) -> dict[int, int]:
    links: dict[int, int] = {}
    gpu = -1
    for line in lines_of(program, "nvlink", "--status"):
        head = re.match(r"GPU (\d+):", line)
        if head:
            gpu = int(head[1])
        elif re.search(r"Link \d+: [\d.]+ GB/s", line):
            links[gpu] = links.get(gpu, 0) + 1
    return links


def xids(lines: list[str] | None = None) -> dict[str, list[dict[str, int]]]:
    """Return hardware errors in the kernel's log, by bus address; none where it may not be read."""
    if lines is None:
        lines = []
        with contextlib.suppress(OSError):
            lines = lines_of("dmesg")
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    errors: dict[str, list[dict[str, int]]] = {}
    for match in filter(None, (re.search(XID, line) for line in lines)):
        if int(match[3]) in HARDWARE_XIDS:
            error = {"code": int(match[3]), "seconds": max(0, int(now - int(match[1])))}
            errors.setdefault(match[2].lower(), []).append(error)
    return errors


def name_of(pid: int) -> str:
    """Return the name of a process; "?" when it is gone, or hidden from this account."""
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return "?"
