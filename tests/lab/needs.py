"""What a test needs of the machine: who lacks it leaves the test out, except in a complete run."""

import os
import shutil
import subprocess
from functools import cache

import pytest

PATHS = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
LACKING = "needs "
UNRUN = "unrun: "
MARKS = ("root", "docker", "slurm")
IS_COMPLETE = "RUN_TESTS_COMPLETE" in os.environ  # set by ./run-tests as root and in CI


def need(what: str) -> None:
    """Leave the test out where this user cannot use a program, or what a mark names."""
    if not IS_COMPLETE and not is_there(what):
        pytest.skip(LACKING + what)


def need_gpus(wanted: int = 1) -> None:
    """Leave the test out where there are fewer GPUs, also in a complete run: none is installed."""
    if (here := gpu_count()) < wanted:
        pytest.skip(UNRUN + (f"{here} of {wanted} GPUs here" if here else "no GPU here"))


@cache
def is_there(what: str) -> bool:
    """Return whether this user can use it."""
    is_root = os.geteuid() == 0
    if what == "docker":
        return has("dockerd") and (is_root or docker_answers())
    return is_root and (what == "root" or has("slurmctld")) if what in MARKS else has(what)


@cache
def gpu_count() -> int:
    """Return how many GPUs nvidia-smi lists; 0 where it is missing or fails."""
    if not has("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def has(program: str) -> bool:
    return bool(shutil.which(program, path=PATHS))


def docker_answers() -> bool:
    return (
        has("docker") and not subprocess.run(["docker", "version"], capture_output=True).returncode
    )
