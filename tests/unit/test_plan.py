"""What ranks are planned to run: where, in which order, with which variables."""

from dataclasses import replace
from pathlib import Path

import pytest

from rackrun.errors import UsageError
from rackrun.launcher.remote.agent.torchrun_process import environment
from rackrun.launcher.run.job import Command, Job, TaskWork
from rackrun.launcher.run.plan import make_plan
from rackrun.launcher.run.planned_host import PlannedHost
from rackrun.launcher.run.settings import Options
from rackrun.run_folder import RunFolder


@pytest.mark.parametrize("pair", [("", "x"), ("a=b", "x"), ("a", "x\0y"), ("a\0", "x")])
def test_a_variable_that_cannot_be_set_is_refused(pair):
    """What execve cannot carry is an error before anything starts."""
    job = Job(Command(("x",)), RunFolder(Path("/x")))
    with pytest.raises(UsageError):
        make_plan(job, [PlannedHost("a", "a", 1, "python", "/", "/x", env=(pair,))], 1)


def test_ranks_are_laid_out_in_the_order_of_hosts():
    """Uneven slots: first ranks, sizes and the master are right, and the plan names every host."""
    job = Job(TaskWork("catdog", ("--epochs", "2")), RunFolder(Path("/x")))
    hosts = [
        PlannedHost(f"h{n}", f"10.0.0.{n}", 1 + n, "/py", "/w", "/x", cores=8) for n in range(3)
    ]
    plan = make_plan(job, hosts, 2345)
    assert [(host.first_rank, host.processes) for host in plan.hosts] == [(0, 1), (1, 2), (3, 3)]
    assert plan.world_size == 6
    for host in plan.hosts:
        assert {"--master-addr=10.0.0.0", "--master-port=2345", "--nnodes=3"} <= set(host.torchrun)
        assert host.command == ("/py", "-u", "-m", "rackrun.training", "catdog", "--epochs", "2")
    assert dict(plan.hosts[2].defaults)["OMP_NUM_THREADS"] == "2"


def test_the_network_device_of_a_host_is_set_unless_it_has_one(monkeypatch):
    """For gloo, and for NCCL by its exact name; a login's own variables and --env go before."""
    options = Options(env=("NCCL_DEBUG=WARN", "NCCL_IB_HCA=mlx5_0"))
    job = Job(Command(("x",)), RunFolder(Path("/x")), options)
    host = PlannedHost("a", "a", 1, "/py", "/w", "/x", interface="eth1")
    variables = replace(host, env=(("NCCL_IB_HCA", "mlx5_1"),))

    def ranks_see(planned: PlannedHost) -> dict[str, str]:
        (plan,) = make_plan(job, [planned], 2345).hosts
        return environment({"defaults": plan.defaults, "environment": plan.environment})

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_IB_HCA"):
        monkeypatch.delenv(name, raising=False)
    observed = ranks_see(host)
    assert (observed["GLOO_SOCKET_IFNAME"], observed["NCCL_SOCKET_IFNAME"]) == ("eth1", "=eth1")
    assert "NCCL_SOCKET_IFNAME" not in ranks_see(replace(host, interface=""))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth0,eth1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    observed = ranks_see(variables)
    assert observed["NCCL_SOCKET_IFNAME"] == "=eth0,eth1"
    assert (observed["NCCL_DEBUG"], observed["NCCL_IB_HCA"]) == ("WARN", "mlx5_1")
    assert not [name for name in observed if name.startswith("TORCH_NCCL_")]


def test_python_means_the_interpreter_of_the_host():
    """`-- python train.py` runs with the Python that has torch; other programs are left alone."""
    assert Command(("python", "train.py")).argv("/venv/python") == ("/venv/python", "train.py")
    assert Command(("bash", "x.sh")).argv("/venv/python") == ("bash", "x.sh")
