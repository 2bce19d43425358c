"""Any free GPUs of a rack: whole hosts first, never twice, in the order of arrival."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.hosts import Lab
from tests.lab.needs import need
from tests.lab.planted_gpus import OLDER, SLEEP, PlantedRack
from tests.lab.waiting import until

NOBODY = 65534
V100 = "Tesla V100-SXM2-16GB, 16384, 0, 41, 0, 0x0000000000000001"
SHOW = "import os; print(os.environ['RANK'], os.environ.get('CUDA_VISIBLE_DEVICES', 'all'))"
RANKS = ("--", sys.executable, "-c", SHOW)


@pytest.fixture
def rack(start_lab: Callable[[int], Lab]) -> PlantedRack:
    """Return three hosts with two GPUs each."""
    need("root")
    return PlantedRack(start_lab(0), (2, 2, 2))


def plan_of(rack: PlantedRack, *args: str) -> list[tuple[str, int, str]]:
    """Return host, ranks and GPUs that a launch would take, from --dry-run."""
    code, out, err = rack.result_of("--dry-run", "--json", *args, str(rack.hosts), "--", "true")
    assert code == 0, err
    hosts = json.loads(out)["hosts"]
    return [
        (host["name"], host["processes"], dict(host["environment"]).get("CUDA_VISIBLE_DEVICES", ""))
        for host in hosts
    ]


def started(rack: PlantedRack, name: str, *args: str) -> "subprocess.Popen[str]":
    """Start a run that lasts, and wait until its first rank runs."""
    run = rack.lab.run_ssh("--name", name, *args, str(rack.hosts), *SLEEP)
    logs = f"runs/2*-{name}/logs/*/rank-0.out"
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


def test_who_waits_for_gpus_is_served_in_the_order_of_arrival(rack):
    """A later launch takes none that an earlier one waits for, whether it names hosts or not."""
    run = started(rack, "night", "--gpus-needed", "5")
    large = rack.lab.run_ssh(
        "--wait", "--name", "large", "--gpus-needed", "4", str(rack.hosts), *RANKS
    )
    until(lambda: rack.inspect()["gpu03"]["queue"], "it waits", 60)
    for args, says in (
        (("--gpus-needed", "1"), "1 GPU needed, 0 free and fit"),
        (("--include", "gpu03:1"), "others wait for it: "),
    ):
        code, _, err = rack.result_of(*args, str(rack.hosts), *RANKS)
        assert (code, says in err) == (78, True), err
    small = rack.lab.run_ssh(
        "--wait", "--name", "small", "--gpus-needed", "1", str(rack.hosts), *RANKS
    )
    until(lambda: len(rack.inspect()["gpu03"]["queue"]) == 2, "it waits behind", 60)
    large.kill()  # a dead waiter holds nobody up
    large.communicate()
    _, err = small.communicate(timeout=120)
    assert small.returncode == 0, err
    assert run.poll() is None
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=120)
    assert [host["free"] for host in rack.inspect().values()] == [[0, 1]] * 3


@pytest.mark.security("PROC-4")
def test_launches_at_the_same_time_share_the_rack(rack):
    """Six launches for a GPU each, at once and without --wait: each gets one of its own."""
    runs = [
        rack.lab.run_ssh("--name", f"r{number}", "--gpus-needed", "1", str(rack.hosts), *SLEEP)
        for number in range(6)
    ]
    until(lambda: not any(host["free"] for host in rack.inspect().values()), "all are used", 120)
    uses = [(host, use["part"]) for host, state in rack.inspect().items() for use in state["uses"]]
    assert sorted(uses) == sorted((f"gpu0{n}", f".gpu{g}") for n in (1, 2, 3) for g in (0, 1))
    for run in runs:
        assert run.poll() is None, run.communicate()
        run.send_signal(signal.SIGINT)
    for run in runs:
        run.communicate(timeout=120)
        assert run.returncode == 130


@pytest.mark.security("PROC-3")
def test_no_file_beside_the_locks_keeps_gpus_from_us(rack):
    """PROC-3: a lock of another account that nobody holds, a pipe and a link for tickets."""
    start = f"/tmp/rackrun-{rack.lab.hosts[0].address}-{rack.lab.hosts[0].port}.lock"
    lock = Path(f"{start}.gpu0")
    pipe, link = (Path(f"{start}.wait-000000000{n}.000000-00000000") for n in (1, 2))
    lock.touch()
    lock.chmod(0o666)
    os.mkfifo(pipe)
    link.symlink_to("/etc/passwd")
    for path in (lock, pipe, link):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    try:
        code, out, err = rack.result_of("--gpus-needed", "6", str(rack.hosts), *RANKS)
        assert (code, out.count("all")) == (0, 6), err
    finally:
        for path in (lock, pipe, link):
            path.unlink()
