"""GPUs of ranks and of hosts, as the launcher sees them."""

import json
import os
import signal
import sys

import pytest

from tests.lab import nvidia
from tests.lab.hosts import Lab
from tests.lab.needs import gpu_count
from tests.lab.waiting import until

pytestmark = pytest.mark.gpu


@pytest.mark.gpu(2)
def test_two_ranks_add_their_gradients_over_nccl(train):
    """NCCL takes one GPU for each rank. A step of both is one of a single rank with all samples."""
    settings = {"model": "watched:Watched", "precision": "fp32", "global_batch": 12}
    alone = train(**settings)
    together = train("--nproc 2 --env NCCL_DEBUG=INFO", **settings)
    logs = "".join(path.read_text() for path in together.logs.rglob("rank-*"))
    assert "NCCL INFO" in logs and "nranks 2" in logs, logs
    assert together.losses == pytest.approx(alone.losses, abs=0.001)


def test_a_killed_rank_ends_the_run_with_its_cause_and_leaves_nothing_on_the_gpu(
    starting, seen, tmp_path
):
    """With two GPUs, the other rank waits for it in an all-reduce of NCCL."""
    launcher = f"--nproc {min(gpu_count(), 2)} --env SECONDS_PER_STEP=0.1"
    with starting(launcher, model="watched:Watched", epochs=1000) as process:
        until(seen, "a rank has taken a step")
        (plan,) = tmp_path.glob("runs/2*/plan.json")
        run_id = json.loads(plan.read_text())["run_id"]
        killed = seen()[0]["pid"]
        assert killed in nvidia.open_by(run_id)
        os.kill(killed, signal.SIGKILL)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGKILL, out + err
    assert "killed by SIGKILL" in json.loads(plan.with_name("result.json").read_text())["cause"]
    until(lambda: not nvidia.open_by(run_id), "no process of the run has a GPU open", 20)


def test_what_a_real_nvidia_smi_reports_is_read_by_a_check(tmp_path, cli):
    """Its XML is a second opinion on what the check reads from its CSV."""
    lab = Lab(tmp_path).ready(1)
    hosts = lab.write_hosts(f"python={sys.executable}")
    try:
        command = f"--json --ssh-config {lab.config} {hosts}"
        found = {row["check"]: row for row in json.loads(cli(f"rackrun check {command}").out)}
        (host,) = json.loads(cli(f"rackrun rack {command}").out)
    finally:
        lab.stop()
    driver, gpus = nvidia.described()
    assert found["driver"]["found"] == driver
    assert found["gpus"]["found"].startswith(f"{len(gpus)} {gpus[0]['name']}")
    for read, gpu in zip(host["gpu_details"], gpus, strict=True):
        assert read["name"] == gpu["name"] and read["total"] == gpu["total"]
        assert read["temperature"] == pytest.approx(gpu["temperature"], abs=10)
        assert read["slowed"] == gpu["slowed"]
        assert bool(read["uncorrected"]) == bool(gpu["uncorrected"])
    sick = any(gpu["uncorrected"] for gpu in gpus)
    assert found["gpu health"]["level"] == ("refused" if sick else "ok")
