"""Hosts with GPUs that torch cannot use: device nodes and nvidia-smi are planted."""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rackrun.cuda import gpu_problem
from rackrun.errors import UsageError
from rackrun.launcher.errors import PreflightRefused
from rackrun.launcher.lifecycle import task_check
from rackrun.launcher.preflight import gpus as judge
from rackrun.launcher.preflight.facts import ClusterFacts, HostFacts, Requirements
from rackrun.launcher.preflight.replies import believed
from rackrun.launcher.remote import gpus as remote
from rackrun.launcher.remote import probe
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.run.job import Command, TaskWork
from rackrun.launcher.transport.local import gpu_count, gpu_model
from tests import warm
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
-q) cat <<END
<?xml version="1.0" ?>
<nvidia_smi_log>
  <driver_version>{driver}</driver_version>
  <gpu id="00000000:3B:00.0">{first}</gpu>
  <gpu id="00000000:5E:00.0">{second}</gpu>
</nvidia_smi_log>
END
;;
--query-gpu=compute_cap) echo {capability}; echo {capability};;
nvlink) echo 'GPU 0: NVIDIA H100'; echo '    Link 0: 26.562 GB/s'; echo '    Link 1: <inactive>';;
esac
"""

HEALTHY = """
    <product_name>NVIDIA H100 80GB HBM3</product_name>
    <pci><pci_bus_id>0</pci_bus_id></pci>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
    </clocks_event_reasons>
    <fb_memory_usage><total>81559 MiB</total><used>4 MiB</used></fb_memory_usage>
    <ecc_errors>
      <volatile>
        <sram_correctable>3</sram_correctable><sram_uncorrectable>0</sram_uncorrectable>
        <dram_correctable>0</dram_correctable><dram_uncorrectable>0</dram_uncorrectable>
      </volatile>
      <aggregate><dram_uncorrectable>5</dram_uncorrectable></aggregate>
    </ecc_errors>
    <remapped_rows>
      <remapped_row_pending>No</remapped_row_pending>
      <remapped_row_failure>No</remapped_row_failure>
    </remapped_rows>
    <temperature><gpu_temp>41 C</gpu_temp></temperature>
    <gpu_power_readings>
      <power_draw>N/A</power_draw><instant_power_draw>71.50 W</instant_power_draw>
      <current_power_limit>700.00 W</current_power_limit>
    </gpu_power_readings>
    <processes>
      <process_info><pid>1</pid><type>C</type></process_info>
      <process_info><pid>2</pid><type>G</type></process_info>
    </processes>
"""
OLDER = """
    <product_name>Tesla V100-SXM2-16GB</product_name>
    <fb_memory_usage><total>16384 MiB</total><used>0 MiB</used></fb_memory_usage>
    <ecc_errors><volatile>
      <single_bit><total>1</total></single_bit>
      <double_bit><device_memory>2</device_memory><total>2</total></double_bit>
    </volatile></ecc_errors>
    <retired_pages><pending_retirement>Yes</pending_retirement></retired_pages>
    <clocks_throttle_reasons>
      <clocks_throttle_reason_hw_slowdown>Active</clocks_throttle_reason_hw_slowdown>
    </clocks_throttle_reasons>
    <temperature><gpu_temp>83 C</gpu_temp></temperature>
    <power_readings><power_draw>N/A</power_draw><power_limit>300.00 W</power_limit></power_readings>
"""

PYTHON = """\
#!/bin/sh
case "$1 $2" in -c*importlib.util*)
echo '{{"version": "3.11.7", "torch": "{torch}", "cuda": "{cuda}", "archs": "sm_80 sm_90"}}'; exit;;
esac
exec {python} "$@"
"""


def smi_text(**facts: str) -> str:
    """Return a program that prints what nvidia-smi does."""
    return SMI.format(**{"first": HEALTHY, "second": HEALTHY, "capability": "9.0", **facts})


def with_gpus(folder: Path) -> tuple[str, ...]:
    """Return the words before a command that give its machine two GPUs."""
    return ("unshare", "--mount", "sh", "-c", DEVICES, str(folder / "dev"))


def with_path(folder: Path) -> str:
    """Return a line for sshd_config that puts a folder on PATH."""
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
        pytest.param(
            *("2.15.0+cpu", "", "570.86.15", "9.0", "torch 2.15.0+cpu is built without CUDA"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("2.15.0+cu132", "13.2", "580.65.06", "7.0"),
            "no code for GPUs of compute capability 7.0",
            marks=pytest.mark.long,
        ),
        ("2.15.0+cu132", "13.2", "580.65.06", "9.0", ""),
    ],
)
def test_gpus_that_torch_cannot_use_are_refused_before_anything_starts(
    start_lab: Labs, torch: str, cuda: str, driver: str, capability: str, says: str
) -> None:
    """78, by --check and by a launch, with the driver and what to install; --device cpu may run."""
    lab = start_lab(0)
    smi = program(lab.folder / "bin/nvidia-smi", smi_text(driver=driver, capability=capability))
    lab.start(command=with_gpus(lab.folder), extra=with_path(smi.parent))
    wait_for_banner(lab.hosts[0].address, lab.hosts[0].port)
    lab.trust()
    report = PYTHON.format(torch=torch, cuda=cuda, python=sys.executable)
    python = program(lab.folder / "python", report)
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


def test_a_failed_run_names_the_sick_gpu(start_lab: Labs) -> None:
    """Refused before the start; started all the same, its failure has a probable cause."""
    lab = start_lab(0)
    smi = program(lab.folder / "bin/nvidia-smi", smi_text(driver="580.65.06", second=OLDER))
    lab.start(command=with_gpus(lab.folder), extra=with_path(smi.parent))
    wait_for_banner(lab.hosts[0].address, lab.hosts[0].port)
    lab.trust()
    hosts = str(lab.write_hosts(f"python={warm.interpreter()} workdir={ROOT}"))
    fails = ("--ignore-check", "code", hosts, "--", "python", "-c", "raise SystemExit(3)")
    code, out, err = lab.result_of(*fails)
    assert (code, f"GPU 1: {ECC}; reset the GPU" in err) == (78, True), err
    code, out, err = lab.result_of("--ignore-check", "gpu health", *fails)
    assert code == 3, err
    assert f"probable cause: GPU 1: {ECC}, slowed by hardware" in out + err


def test_what_drivers_print_is_read_whatever_their_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health of a new and an old GPU; what is N/A or not there counts as nothing."""
    text = smi_text(driver="550.54.15", second=OLDER)
    smi = program(tmp_path / "bin/nvidia-smi", text)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(remote, "xids", lambda: {"0000:5e:00": [{"code": 79, "seconds": 60}]})
    result = remote.gpus(full=True)
    believed("gpus", result)
    assert (result["driver"], result["capabilities"]) == ("550.54.15", ["9.0", "9.0"])
    assert [each["pid"] for each in result["processes"]] == [1]
    assert result["gpus"][0] == {
        "name": "NVIDIA H100 80GB HBM3", "total": 81559, "used": 4, "temperature": 41, "power": 71,
        "power_limit": 700, "uncorrected": 0, "remapping": "", "recovery": "", "slowed": [],
        "xids": [], "links": 1,
    }  # fmt: skip
    assert result["gpus"][1] == {
        "name": "Tesla V100-SXM2-16GB", "total": 16384, "used": 0, "temperature": 83, "power": 0,
        "power_limit": 300, "uncorrected": 2, "remapping": "pending", "recovery": "",
        "slowed": ["hw_slowdown"], "xids": [{"code": 79, "seconds": 60}], "links": 0,
    }  # fmt: skip
    assert "Xid" not in judge.suspects(result, 59)
    assert judge.suspects(result, 60) == (
        "GPU 1: 2 uncorrected ECC errors since the driver was loaded, slowed by hardware,"
        " remaps broken memory at its next reset, Xid 79 1:00 ago"
    )


def test_the_kernels_log_names_the_gpu_and_the_age_of_its_errors() -> None:
    """Errors of hardware only: those of programs, such as 13 and 31, are not the GPU's."""
    now = int(time.clock_gettime(time.CLOCK_BOOTTIME))
    processes = remote.xids(
        [
            f"[{now - 5:8}.123456] NVRM: Xid (PCI:0000:3B:00): 79, pid=7, fell off",
            f"[{now - 9}.1] NVRM: Xid (0000:3b:00): 48, DBE",
            f"[{now - 9}.1] NVRM: Xid (PCI:0000:3b:00): 31, pid=7, MMU fault",
            "[nonsense] NVRM: Xid (PCI:0000:3b:00): 79",
        ]
    )
    assert [each["code"] for each in processes.pop("0000:3b:00")] == [79, 48] and not processes


def test_gpus_of_amd_count_where_their_tools_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
BROKEN = "its broken memory cannot be remapped: replace it"


def finding(label: str, **gpu: object) -> HostFacts:
    """Return a host with two GPUs, of which the second has these facts."""
    usual = {
        "name": "H100", "total": 81559, "used": 4, "power": 71, "power_limit": 700,
        "temperature": 41, "links": 18,
    }  # fmt: skip
    replies: dict[str, Any] = {"look": {"gpus": 2, "interpreter": {}}}
    replies["gpus"] = {"gpus": [usual, {**usual, **gpu}], "processes": [], "driver": "550"}
    return HostFacts(Host(label), replies=replies)


@pytest.mark.parametrize(
    ("gpu", "sick", "suspicious", "odd"),
    [
        ({}, "", "", ""),
        (
            {"uncorrected": 1},
            "GPU 1: 1 uncorrected ECC error since the driver was loaded",
            "",
            "",
        ),
        (
            {"remapping": "failed"},
            "GPU 1: its broken memory cannot be remapped: replace it",
            "",
            "",
        ),
        ({"recovery": "Drain and Reset"}, "GPU 1: asks for: Drain and Reset", "", ""),
        ({"recovery": "Drain P2P"}, "", "", ""),
        ({"remapping": "pending"}, "", "GPU 1: remaps broken memory at its next reset", ""),
        (
            {"slowed": ["hw_thermal_slowdown", "sw_thermal_slowdown"]},
            "",
            "GPU 1: slowed by heat",
            "",
        ),
        ({"power_limit": 300}, "", "", "power limit 300 W and 700 W, elsewhere 700 W"),
        ({"links": 12}, "", "", "NVLinks 12 and 18, elsewhere 18"),
        (
            {"xids": [{"code": 79, "seconds": 60}, {"code": 79, "seconds": 30}]},
            "",
            "GPU 1: Xid 79 0:30 ago",
            "",
        ),
        (
            {"name": "A100", "total": 40960},
            "",
            "",
            "model A100 and H100, elsewhere H100; memory 40 GiB and 80 GiB, elsewhere 80 GiB",
        ),
    ],
    ids=str,
)
def test_sick_gpus_are_refused_and_the_odd_one_out_is_named(
    gpu: dict[str, object], sick: str, suspicious: str, odd: str
) -> None:
    """By GPU and reason; not where the ranks use the CPU, or other GPUs of the host."""
    host = finding("c", **gpu)
    cluster = ClusterFacts((finding("a"), finding("b"), host))
    assert judge.sick(host, cluster) == sick
    assert judge.suspicious(host, cluster) == suspicious
    assert judge.odd_one_out(host, cluster) == odd
    assert judge.sick(host, replace(cluster, requirements=Requirements("", on_cpu=True))) == ""
    assert judge.gpu_model(host) == ("A100 and H100" if "name" in gpu else "H100")
    other = replace(host, host=replace(host.host, devices=(0,)))
    assert judge.gpu_model(other) == "H100"
    torch = {"look": {**host["look"], "interpreter": {"torch": "2.15.0+cu132"}}}
    report = replace(cluster, hosts=(replace(host, replies={**host.replies, **torch}), other))
    assert report.versions == "torch 2.15.0+cu132, driver 550"
    on_cpu = Requirements("", on_cpu=True)
    assert replace(report, requirements=on_cpu).versions == "torch 2.15.0+cu132"
    assert judge.sick(other, cluster) == judge.suspicious(other, cluster) == ""


def test_the_table_shows_heat_power_and_links() -> None:
    """Of the hottest and the strongest GPU that a run may use, rounded up."""
    host = finding("a", temperature=83, power=412)
    assert judge.state(host) == "to 90 °C, to 500 W, 18 NVLinks"
    first = replace(host, host=replace(host.host, devices=(0,)))
    assert judge.state(first) == "to 50 °C, to 100 W, 18 NVLinks"
    assert judge.models(host) == "2 H100 80 GiB"


def test_a_host_with_another_driver_is_the_odd_one_out() -> None:
    """As its torch may behave otherwise."""
    host = finding("c")
    host.replies["gpus"]["driver"] = "580"
    cluster = ClusterFacts((finding("a"), finding("b"), host))
    assert judge.odd_one_out(host, cluster) == "driver 580, elsewhere 550"


def test_advice_fits_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """When torch cannot use the GPUs here, a script is not advised --device cpu."""
    monkeypatch.setattr(task_check, "gpu_count", lambda environment: 2)
    monkeypatch.setattr(probe, "describe", lambda pythons: {"torch": "2.15.0+cpu"})
    for work, says in ((TaskWork("catdog"), "--device cpu"), (Command(("x",)), "VISIBLE_DEVICES=")):
        with pytest.raises(PreflightRefused, match=says) as refused:
            task_check.check_gpus(work, 1, "here", "python", "")
        assert ("--device" in str(refused.value)) == isinstance(work, TaskWork)


def test_more_ranks_of_a_task_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each needs its own, unless they train on the CPU; a command may share them."""
    monkeypatch.setattr(task_check, "gpu_count", lambda environment: 2)
    monkeypatch.setattr(probe, "describe", lambda pythons: {})
    with pytest.raises(
        UsageError, match="--nproc 3: a rank needs its own GPU, and this machine has 2"
    ):
        task_check.check_gpus(TaskWork("catdog"), 3, "here", "python", "")
    for work in (TaskWork("catdog", ("--device", "cpu")), Command(("x",))):
        task_check.check_gpus(work, 3, "here", "python", "")


def test_more_ranks_of_a_task_than_memory_holds_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The line says how much they need and what is here; a command may be a small one."""
    pages = {"SC_PHYS_PAGES": 1_000_000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    needs = "--nproc 200: needs 100.0 GB of memory, at least 500.0 MB a rank"
    says = rf"{needs}, and this machine has 4.1 GB"
    with pytest.raises(UsageError, match=rf"{says}; type --nproc \d+, a rank per core"):
        task_check.refuse_more_than_fit(TaskWork("catdog"), 200)
    task_check.refuse_more_than_fit(TaskWork("catdog"), 8)
    task_check.refuse_more_than_fit(Command(("x",)), 200)
    monkeypatch.setitem(pages, "SC_PHYS_PAGES", 100_000)
    task_check.refuse_more_than_fit(TaskWork("catdog"), 1)


def test_gpus_of_amd_count_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do on hosts; those that are hidden do not."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(remote, "gpu_count", lambda: 4)
    assert gpu_count() == 4
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0,2")
    assert gpu_count() == 2
    assert gpu_count([("CUDA_VISIBLE_DEVICES", "GPU-8a1c,GPU-77,-1,GPU-3")]) == 2
    assert gpu_count([("CUDA_VISIBLE_DEVICES", "NoDevFiles")]) == 0


def test_the_driver_names_the_gpus_of_this_machine(tmp_path: Path) -> None:
    """Each model once, whatever the folder of a GPU holds."""
    text = "Model: \t\t NVIDIA {}\nIRQ:   \t\t 27\nGPU UUID: \t GPU-0\n"
    for bus, content in enumerate((text.format("A40"), text.format("A40"), "IRQ: 3\n")):
        (tmp_path / str(bus)).mkdir()
        (tmp_path / str(bus) / "information").write_text(content)
    assert gpu_model(tmp_path) == "A40"
    assert gpu_model(tmp_path / "none") == ""


def test_a_rank_that_finds_no_gpu_does_not_train_on_the_cpu(tmp_path: Path) -> None:
    """Two GPUs were counted here, and torch finds none: 78 and a line that says why."""
    python = str(warm.interpreter())
    command = (*with_gpus(tmp_path), python, "-m", "rackrun.launcher", "local", "--python", python)
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
