"""Any free GPUs of a rack: whole hosts first, never twice, in the order of arrival."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.lab.hosts import Lab
from tests.lab.needs import need
from tests.lab.simulated_gpus import OLDER, SLEEP, SimulatedRack
from tests.lab.waiting import until

V100 = "Tesla V100-SXM2-16GB, 16384, 0, 41, 0, 0x0000000000000001"
SHOW = "import os; print(os.environ['RANK'], os.environ.get('CUDA_VISIBLE_DEVICES', 'all'))"
RANKS = ("--", sys.executable, "-c", SHOW)


@pytest.fixture
def rack(start_lab: Callable[[int], Lab]) -> SimulatedRack:
    """Return three hosts with two GPUs each."""
    need("root")
    return SimulatedRack(start_lab(0), (2, 2, 2))


def plan_of(rack: SimulatedRack, *args: str) -> list[tuple[str, int, str]]:
    """Return host, ranks and GPUs that a launch would take, from --dry-run."""
    code, out, err = rack.result_of("--dry-run", "--json", *args, str(rack.hosts), "--", "true")
    assert code == 0, err
    hosts = json.loads(out)["hosts"]
    return [
        (host["name"], host["processes"], dict(host["environment"]).get("CUDA_VISIBLE_DEVICES", ""))
        for host in hosts
    ]


def started(rack: SimulatedRack, name: str, *args: str) -> "subprocess.Popen[str]":
    """Start a run that lasts, and wait until its first rank runs."""
    run = rack.lab.run_ssh("--name", name, *args, str(rack.hosts), *SLEEP)
    logs = f"runs/2*-{name}/logs/*/*/rank-0.out"
    until(lambda: any(path.read_text() for path in rack.lab.folder.glob(logs)), name, 60)
    return run


def test_free_gpus_are_found_around_runs_and_sick_ones(rack):
    """By the locks of runs and nvidia-smi: what is left is taken, or 78 says what there is."""
    assert plan_of(rack, "--gpus-needed", "2") == [("gpu01", 2, "")]
    assert plan_of(rack, "--gpus-needed", "3") == [("gpu01", 2, ""), ("gpu02", 1, "0")]
    run = started(rack, "night", "--include", "gpu02:1")
    rack.set_gpu("gpu01", 0, OLDER)
    assert plan_of(rack, "--gpus-needed", "4") == [
        ("gpu01", 1, "1"),
        ("gpu02", 1, "0"),
        ("gpu03", 2, ""),
    ]
    code, out, err = rack.result_of("--plain", "--gpus-needed", "2", str(rack.hosts), *RANKS)
    assert (code, sorted(out.split("\n"))) == (0, ["", "0 | 0 all", "1 | 1 all"]), err
    code, _, err = rack.result_of("--gpus-needed", "5", str(rack.hosts), *RANKS)
    assert (code, "5 GPUs needed, 4 free and fit" in err) == (78, True), err
    code, _, err = rack.result_of("--wait", "--gpus-needed", "6", str(rack.hosts), *RANKS)
    assert (code, "6 GPUs needed, 4 free and fit" in err) == (78, True), "in vain: one is sick"
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=120)


def test_model_and_memory_choose_gpus(rack):
    """Only GPUs of that name and size are taken; too few of them: 78, with what there is."""
    for number in range(2):
        rack.set_gpu("gpu01", number, V100)
    older = [("gpu01", 2, "")]
    assert plan_of(rack, "--gpus-needed", "2", "--gpu", "v100") == older
    assert (
        plan_of(rack, "--gpus-needed", "2", "--gpu", "h100", "--gpu-memory", "80")[0][0] != "gpu01"
    )
    assert plan_of(rack, "--gpus-needed", "4", "--gpu-memory", "40") == [
        ("gpu02", 2, ""),
        ("gpu03", 2, ""),
    ]
    chosen = ("--gpus-needed", "3", "--gpu", "v100", "--gpu-memory", "16")
    code, _, err = rack.result_of("--wait", *chosen, str(rack.hosts), *RANKS)
    assert code == 78
    assert "3 GPUs v100 with 16 GB needed, 2 free and fit; there are 4 NVIDIA H100 80GB HBM3" in err
    assert "2 Tesla V100-SXM2-16GB of 17 GB" in err


def test_variables_that_choose_gpus_count(rack):
    """--env, env= and the account's start files: ranks, and locks, are of those GPUs."""
    one = ("--include", "gpu01", "--env")
    assert plan_of(rack, *one, "CUDA_VISIBLE_DEVICES=1") == [("gpu01", 1, "1")]
    assert plan_of(rack, *one, "CUDA_VISIBLE_DEVICES=GPU-7c") == [("gpu01", 1, "GPU-7c")]
    assert plan_of(rack, *one, "CUDA_VISIBLE_DEVICES=") == [("gpu01", 1, "")]
    (rack.home_of("gpu02") / ".bashrc").write_text("export CUDA_VISIBLE_DEVICES=1\n")
    assert plan_of(rack, "--include", "gpu02") == [("gpu02", 1, "")]
    (rack.home_of("gpu02") / ".bashrc").unlink()
    code, _, err = rack.result_of(
        *("--include", "gpu01:0", "--env", "CUDA_VISIBLE_DEVICES=1"), str(rack.hosts), *RANKS
    )
    assert (code, "and so does CUDA_VISIBLE_DEVICES" in err) == (64, True), err
    run = started(rack, "night", *one, "CUDA_VISIBLE_DEVICES=1")
    assert plan_of(rack, "--gpus-needed", "2", "--exclude", "gpu03") == [("gpu02", 2, "")]
    assert plan_of(rack, "--gpus-needed", "3", "--exclude", "gpu03")[0] == ("gpu01", 1, "0")
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=120)
