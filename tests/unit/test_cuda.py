"""GPUs that a build of torch cannot use: by NVIDIA's minimum drivers, and by architecture."""

import subprocess
import sys

import pytest

from rackrun import cuda

ARCHS = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"  # of 2.15.0+cu132


@pytest.mark.parametrize(
    ("build", "driver", "capability", "says"),
    [
        ("13.2", "580.65.06", "9.0", ""),
        ("13.2", "600.1", "8.9", ""),
        (
            "13.2",
            "575.57.08",
            "9.0",
            "too old for CUDA 13.2, which needs 580 or newer; install a newer driver, or a build",
        ),
        ("13.2", "570.86.15", "9.0", "pip install 'torch<2.11' torchvision"),
        ("12.8", "525.60.13", "9.0", ""),
        ("12.8", "470.82.01", "8.0", "needs 525 or newer; install driver 525 or newer"),
        ("11.8", "440.33", "7.5", "needs 450 or newer; install driver 525 or newer"),
        (
            "",
            "580.65.06",
            "9.0",
            "torch 2.15.0 is built without CUDA; install a build for this driver and GPU",
        ),
        ("", "", "", "/whl/cu130"),
        ("13.2", "", "", ""),
        ("13.2", "580.65.06", "7.0", "no code for GPUs of compute capability 7.0 (only sm_75"),
        ("13.2", "580.65.06", "7.0", "this driver and GPU: pip install 'torch<2.11' torchvision"),
        ("13.2", "580.65.06", "6.1", "'torch<2.15' torchvision --index-url https://"),
        ("", "535.104", "12.0", "or a build for this driver and GPU: pip install 'torch<2.11'"),
        ("12.6", "580.65.06", "3.5", "no build of torch since 2.10 has code for all GPUs here"),
        ("13.2", "580.65.06", "12.1", ""),
        ("13.2", "580.65.06", "11.0", "compute capability 11.0"),
        ("13.2", "580.65.06", "[N/A]", ""),
    ],
)
def test_what_torch_cannot_use_is_refused_with_what_to_install(build, driver, capability, says):
    """By driver and architecture; what is not known is not refused."""
    result = cuda.gpu_problem("2.15.0", build, ARCHS, driver, [capability] * 8)
    assert (says in result) if says else (result == "")


def test_intermediate_code_runs_on_all_later_gpus():
    """compute_90 is compiled for a GPU by its driver, also for 12.0 but not for 8.0."""
    problems = [
        cuda.gpu_problem("2", "13.0", "sm_90 compute_90", "580", [c]) for c in ("12.0", "8.0")
    ]
    assert [bool(problem) for problem in problems] == [False, True]


@pytest.mark.parametrize(
    ("gpus", "lock"),
    [
        (["580.65.06, 9.0"] * 8, "base"),
        (["580.65.06, 7.0"], "cuda12"),
        (["580.65.06, 7.0", "580.65.06, 9.0"], "cuda12"),
        (["580.65.06, 7.0", "580.65.06, 13.0"], "base"),
        (["535.104.05, 9.0"], "cuda12"),
        (["580.65.06, 6.1"], "base"),
        (["470.82.01, 7.0"], "base"),
        (["NVIDIA-SMI has failed because it could not reach the driver."], "base"),
        (["[N/A], [N/A]"], "base"),
        ([], "base"),
        (None, "base"),
    ],
)
def test_the_lock_for_this_machine(gpus, lock, tmp_path):
    """By what nvidia-smi prints: the older one for V100 and for drivers without CUDA 13, the usual
    one where no lock fits, and where nothing is known."""
    if gpus is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{gpu}'\n" for gpu in gpus))
        program.chmod(0o755)
    args = [sys.executable, "-P", "-S", cuda.__file__]
    message = subprocess.run(args, env={"PATH": str(tmp_path)}, capture_output=True, check=True)
    assert message.stdout.decode() == f"{lock}\n"


def test_the_version_of_the_driver_here(tmp_path, monkeypatch):
    """As the kernel module reports it."""
    monkeypatch.setattr(cuda, "DRIVER", tmp_path / "version")
    assert cuda.driver_here() == ""
    cuda.DRIVER.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65  R\n")
    assert cuda.driver_here() == "580.65"
