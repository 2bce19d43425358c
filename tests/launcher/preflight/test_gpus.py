"""Hosts with GPUs that torch cannot use: device nodes and nvidia-smi are simulated."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rackrun.cuda import gpu_problem
from rackrun.launcher.preflight import gpus as judge
from rackrun.launcher.preflight.replies import Gpus, checked_reply
from rackrun.launcher.remote import gpus as remote
from tests.lab import warm
from tests.lab.hosts import ROOT, Lab
from tests.lab.needs import need
from tests.lab.simulated_gpus import DEVICES, HEALTHY, OLDER, program, with_path

SMI = """\
#!/bin/sh
case "$1" in *"{refused}"*) echo 'Field "{refused}" is not a valid field to query.'; exit 2;; esac
cat <<END
{first}, {driver}, {capability}
{second}, {driver}, {capability}
END
"""

BROKEN = """\
#!/bin/sh
echo 'Failed to initialize NVML: Driver/library version mismatch'
echo 'NVML library version: 580.65'
exit 18
"""

PYTHON = """\
#!/bin/sh
case "$1 $2" in -c*importlib.util*)
echo '{{"version": "3.11.7", "torch": "2.15.0+cu132", "cuda": "13.2", "archs": "sm_90"}}'; exit;;
esac
exec {python} "$@"
"""


def smi_text(**facts: str) -> str:
    """Return a program that prints what nvidia-smi does."""
    usual = {"first": HEALTHY, "second": HEALTHY, "capability": "9.0", "refused": "nothing"}
    return SMI.format(**{**usual, **facts})


def with_gpus(folder: Path) -> tuple[str, ...]:
    """Return the words before a command that give its machine two GPUs."""
    need("root")
    return ("unshare", "--mount", "sh", "-c", DEVICES, str(folder / "dev"))


def host_with_gpus(lab: Lab, smi: str) -> None:
    """Start a host with two GPUs, and a program in place of nvidia-smi."""
    path = program(lab.folder / "bin/nvidia-smi", smi)
    lab.ready(1, command=with_gpus(lab.folder), extra=with_path(path.parent))


@pytest.mark.parametrize(
    ("driver", "says"),
    [("570.86.15", "driver 570.86.15 is too old for CUDA 13.2"), ("580.65.06", "")],
)
def test_gpus_that_torch_cannot_use_are_refused_before_anything_starts(start_lab, driver, says):
    """78, by --check and by a launch, with the driver and what to install; --device cpu may run."""
    lab = start_lab(0)
    host_with_gpus(lab, smi_text(driver=driver))
    python = program(lab.folder / "python", PYTHON.format(python=sys.executable))
    hosts = str(lab.write_hosts(f"python={python} workdir={ROOT}"))
    args = ("--ignore-check", "code", hosts, "catdog", "--synthetic")
    code, out, err = lab.result_of("--check", *args)
    assert "2 NVIDIA H100 80GB HBM3" in out, out + err
    shown = " ".join(out.split())
    assert (code, driver in shown, not says or says in shown) == (78 if says else 0, True, True)
    if says:
        code, out, err = lab.result_of(*args)
        assert (code, says in err, "--device cpu" in err) == (78, True, True), err
        assert lab.result_of("--check", *args, "--device", "cpu")[0] == 0


def test_a_driver_that_does_not_work_is_refused(start_lab):
    """As after an update without a reboot: the table and the launch say what nvidia-smi says."""
    lab = start_lab(0)
    host_with_gpus(lab, BROKEN)
    hosts = str(lab.write_hosts(f"python={warm.interpreter()} workdir={ROOT}"))
    code, out, err = lab.result_of("--ignore-check", "code", hosts, "--", "true")
    says = "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch"
    assert (code, out, says in err) == (78, "", True), err


def test_a_failed_run_names_the_sick_gpu(start_lab):
    """Refused before the start; started all the same, its failure has a probable cause."""
    lab = start_lab(0)
    host_with_gpus(lab, smi_text(driver="580.65.06", second=OLDER))
    hosts = str(lab.write_hosts(f"python={warm.interpreter()} workdir={ROOT}"))
    fails = ("--ignore-check", "code", hosts, "--", "python", "-c", "raise SystemExit(3)")
    code, out, err = lab.result_of(*fails)
    assert (code, f"GPU 1: {ECC}; reset the GPU" in err) == (78, True), err
    code, out, err = lab.result_of("--ignore-check", "gpu health", *fails)
    assert code == 3, err
    assert f"probable cause: GPU 1: {ECC}, slowed by hardware" in out + err


@pytest.mark.parametrize("refused", ["nothing", "compute_cap"])
def test_what_drivers_print_is_read_whatever_their_age(refused, tmp_path, monkeypatch):
    """Health of a new and an old GPU; what is N/A counts as nothing. Old drivers do not know the
    compute capability."""
    unknown = "NVIDIA GB10, [N/A], [N/A], [Unknown Error], [N/A], [Not Supported]"
    capability = "9.0" if refused == "nothing" else ""
    text = smi_text(
        driver="550.54.15", first=unknown, second=OLDER, refused=refused, capability=capability
    )
    smi = program(tmp_path / "bin/nvidia-smi", text)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    result = remote.gpus()
    found = checked_reply(result, Gpus, "gpu01")
    assert (result["driver"], result["capabilities"]) == (
        "550.54.15",
        ["9.0", "9.0"] if capability else [],
    )
    nothing = {"total": 0, "used": 0, "temperature": 0, "uncorrected": 0, "slowed": ""}
    assert result["gpus"] == [
        {"name": "NVIDIA GB10", **nothing},
        {
            "name": "Tesla V100-SXM2-16GB", "total": 16384, "used": 0, "temperature": 83,
            "uncorrected": 2, "slowed": "hardware",
        },
    ]  # fmt: skip
    assert judge.suspects(found) == f"GPU 1: {ECC}, slowed by hardware"


def test_gpus_of_amd_count_where_their_tools_are(tmp_path, monkeypatch):
    """The driver's nodes without a GPU are CPUs; a torch for ROCm is no torch without CUDA."""
    for node, gpu in enumerate((0, 38400, 51110)):
        path = tmp_path / str(node) / "gpu_id"
        path.parent.mkdir()
        path.write_text(f"{gpu}\n")
    monkeypatch.setattr(remote, "KFD_NODES", str(tmp_path))
    (tools := tmp_path / "tools").mkdir()
    (tools / "rocm-smi").write_text("#!/bin/sh\n")
    (tools / "rocm-smi").chmod(0o755)
    for driver, path, count in ((tmp_path, tools, 2), (tmp_path, "", 0), ("none", tools, 0)):
        monkeypatch.setattr(remote, "KFD", str(driver))
        monkeypatch.setenv("PATH", str(path))
        monkeypatch.setattr(remote, "is_gpu", lambda name: False)  # no NVIDIA GPU in /dev
        assert remote.gpu_count() == count
    monkeypatch.setattr(remote, "KFD", str(tmp_path))
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(remote, "KFD_NODES", str(tmp_path / "none"))
    assert remote.gpu_count() == 0
    assert gpu_problem("2.9.0+rocm6.4", "", "", "", []) == ""


ECC = "2 uncorrected ECC errors since the driver was loaded"


def test_gpus_of_amd_count_on_this_machine(monkeypatch):
    """As they do on hosts; those that are hidden do not."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(remote, "gpu_count", lambda: 4)
    assert remote.gpus_of_ranks({}) == 4
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0,2")
    assert remote.gpus_of_ranks({}) == 2
    assert remote.gpus_of_ranks({"CUDA_VISIBLE_DEVICES": "GPU-8a1c,GPU-77,-1,GPU-3"}) == 2
    assert remote.gpus_of_ranks({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}) == 0


def test_a_rank_that_finds_no_gpu_does_not_train_on_the_cpu(tmp_path):
    """Two GPUs were counted here, and torch finds none: 78 and a line that says why."""
    python = str(warm.interpreter())
    command = (*with_gpus(tmp_path), python, "-m", "rackrun", "./run-local", "--python", python)
    ended = subprocess.run(
        [*command, "catdog", "--synthetic", "--epochs", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 78, ended.stderr
    assert "torch cannot use the GPUs here: " in ended.stderr
    assert "to train on the CPU type --device cpu" in ended.stderr
    assert "Traceback" not in ended.stderr
