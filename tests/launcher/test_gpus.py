"""Hosts with GPUs that torch cannot use: device nodes and nvidia-smi are planted."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.lab import ROOT, Lab, wait_for_banner

Labs = Callable[[int], Lab]

DEVICES = """\
mkdir "$0" && mount --rbind /dev "$0" && mount -t tmpfs none /dev && cd /dev || exit
for name in null zero full random urandom tty; do touch $name && mount --bind "$0/$name" $name; done
for name in pts shm; do mkdir $name && mount --rbind "$0/$name" $name; done
ln -s /proc/self/fd fd; ln -s pts/ptmx ptmx; touch nvidia0 nvidia1 nvidiactl
cd "$OLDPWD" && exec "$@"
"""
"""Runs a command where /dev has two GPUs, for it alone."""

SMI = """\
#!/bin/sh
case "$1" in
*driver_version*) for gpu in 0 1; do echo "$gpu, NVIDIA H100 80GB HBM3, 81559, 4, {driver}"; done;;
*compute_cap*) echo {capability}; echo {capability};;
esac
"""

PYTHON = """\
#!/bin/sh
case "$1 $2" in -c*importlib.util*)
echo '{{"version": "3.11.7", "torch": "{torch}", "cuda": "{cuda}", "archs": "sm_80 sm_90"}}'; exit;;
esac
exec {python} "$@"
"""


def with_gpus(folder: Path) -> tuple[str, ...]:
    """What goes before a command, so that its machine has two GPUs."""
    return ("unshare", "--mount", "sh", "-c", DEVICES, str(folder / "dev"))


def with_path(folder: Path) -> str:
    """A line for sshd, so that programs in a folder are found."""
    return f'ForceCommand PATH={folder}:$PATH; export PATH; eval "$SSH_ORIGINAL_COMMAND"\n'


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("torch", "cuda", "driver", "capability", "says"),
    [
        ("2.15.0+cu132", "13.2", "570.86.15", "9.0", "driver 570.86.15 is too old for CUDA 13.2"),
        ("2.15.0+cpu", "", "570.86.15", "9.0", "torch 2.15.0+cpu is built without CUDA"),
        ("2.15.0+cu132", "13.2", "580.65.06", "7.0", "no code for GPUs of compute capability 7.0"),
        ("2.15.0+cu132", "13.2", "580.65.06", "9.0", ""),
    ],
)
def test_gpus_that_torch_cannot_use_are_refused_before_anything_starts(
    lab: Labs, torch: str, cuda: str, driver: str, capability: str, says: str
) -> None:
    """78, by --check and by a launch, with the driver and what to install; --device cpu may run."""
    one = lab(0)
    smi = program(one.folder / "bin/nvidia-smi", SMI.format(driver=driver, capability=capability))
    one.start(command=with_gpus(one.folder), extra=with_path(smi.parent))
    wait_for_banner(one.hosts[0].address, one.hosts[0].port)
    one.trust()
    told = PYTHON.format(torch=torch, cuda=cuda, python=sys.executable)
    python = program(one.folder / "python", told)
    hosts = str(one.write_hosts(f"python={python} workdir={ROOT}"))
    words = ("--ignore-check", "code", hosts, "catdog", "--synthetic")
    code, out, err = one.said("--check", *words)
    assert "2 NVIDIA H100 80GB HBM3" in out, out + err
    shown = " ".join(out.split())
    assert (code, driver in shown, not says or says in shown) == (78 if says else 0, True, True)
    if says:
        code, out, err = one.said(*words)
        assert (code, says in err, "--device cpu" in err) == (78, True, True), err
        assert one.said("--check", *words, "--device", "cpu")[0] == 0


def test_a_rank_that_finds_no_gpu_does_not_train_on_the_cpu(tmp_path: Path) -> None:
    """Two GPUs were counted here, and torch finds none: 78 and a line that says why."""
    command = (*with_gpus(tmp_path), sys.executable, "-m", "launcher", "local")
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
