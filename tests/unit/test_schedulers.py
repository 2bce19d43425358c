"""The same plan under every scheduler, and none where the node rank is unknown."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rackrun.launcher.commands.node import detected_in, placement_here, spec_of, with_free_port
from rackrun.launcher.commands.settings import NodeOptions
from rackrun.launcher.run.job import Command
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.planned_host import PlannedHost
from rackrun.launcher.schedulers import Placement, find_placement
from rackrun.launcher.schedulers.slurm import allocated, expand
from tests.lab import warm
from tests.lab.scheduler import recorded

GOLDEN = json.loads(Path(__file__).with_name("schedulers.json").read_text())
ALONE = {"NNODES": "1"}
WORK = Command(("python", "train.py"))


def detected(placement: Placement, options: NodeOptions) -> tuple[dict[str, Any], Plan]:
    """Return what a node would show of itself, whatever this machine is like."""
    here = PlannedHost("here", "127.0.0.1", 1, "python", "/w", "/x")
    return detected_in(placement, spec_of(placement, WORK, options), options, here)


def planned(name: str) -> Any:
    """Return the node's placement and plan."""
    environment = recorded(name)
    placement = find_placement(environment)
    options = NodeOptions(
        nproc=(2, 1, 4)[placement.node.value] if placement.nodes.value == 3 else 0
    )
    result, plan = detected(placement_here(options, environment), options)
    (host,) = plan.hosts
    return {
        "platform": result["platform"],
        **{
            name: f"{part['value']} ({part['origin']})"
            for name, part in result.items()
            if isinstance(part, dict)
        },
        "torchrun": " ".join(
            text for text in host.torchrun if text.startswith(("--n", "--m")) and "=" in text
        ),
        "ranks": f"{host.first_rank} + {host.processes} of {plan.world_size}",
        "promised": dict(host.environment)["RACKRUN_WORLD_SIZE"],
    }


@pytest.mark.parametrize("name", GOLDEN)
def test_the_plan_of_every_recorded_environment_is_known(name, monkeypatch):
    """Rank, size, master and port, each with its origin; three nodes have --nproc 2, 1 and 4."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert planned(name) == GOLDEN[name]


def test_an_option_says_more_than_the_platform():
    """`--master`, `--port` and `--nproc` replace what was found, and are named as the origin."""
    options = NodeOptions(master="10.0.0.7", port=4000, nproc=2)
    placement = placement_here(options, recorded("openmpi-no-master"))
    assert (placement.master.value, placement.master.origin) == ("10.0.0.7", "--master")
    assert (placement.port.value, placement.port.origin) == (4000, "--port")
    assert placement.processes is not None
    assert (placement.processes.value, placement.processes.origin) == (2, "--nproc")


def test_a_single_node_shows_the_port_that_it_would_take():
    """A free one, whatever the scheduler's would be, unless --port names another."""
    single = with_free_port(placement_here(NodeOptions(), ALONE))
    assert single.port.origin == "free here"
    _, plan = detected(single, NodeOptions())
    assert f"--master-port={single.port.value}" in plan.hosts[0].torchrun
    for name, options, origin in (
        ("by-hand", NodeOptions(port=4000), "--port"),
        ("slurm-step-2", NodeOptions(), "SLURM_JOB_ID, SLURM_STEP_ID"),
    ):
        given = placement_here(options, recorded(name))
        assert with_free_port(given) == given and given.port.origin == origin


def test_steps_of_one_job_do_not_meet():
    """Two at the same time, as in a sweep: another port, and another name of the job."""
    step = recorded("slurm-step-2")
    one, other = (find_placement({**step, "SLURM_STEP_ID": number}) for number in ("0", "1"))
    assert one.port.value != other.port.value and one.job != other.job


@pytest.mark.parametrize(
    "text, names",
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[08-11,20],login", ["gpu08", "gpu09", "gpu10", "gpu11", "gpu20", "login"]),
        ("r[1-2]n[1,3]-ib", ["r1n1-ib", "r1n3-ib", "r2n1-ib", "r2n3-ib"]),
    ],
)
def test_node_lists_are_read_as_slurm_writes_them(text, names):
    """Ranges keep their zeros, and of several ranges the last one counts fastest."""
    assert expand(text, "SLURM_STEP_NODELIST") == names


@pytest.mark.parametrize(
    "name, lines",
    [
        ("slurm-salloc", ["n1", "n2"]),
        ("slurm-batch", ["n1 2", "n2 2", "n3 2"]),
        ("slurm-het-batch", ["n1 1", "n2 1", "n3 1"]),
        ("slurm-uneven-tasks", ["n1 4", "n2 2", "n3 1"]),
    ],
)
def test_an_allocation_is_a_list_of_hosts(name, lines):
    """Of all its parts; with slots where tasks were asked for."""
    hosts = allocated(recorded(name))
    assert [f"{host.name} {host.slots or ''}".strip() for host in hosts] == lines


def test_the_gpus_of_an_allocation_are_slots():
    """What was asked for per node, with or without a kind of GPU."""
    for asked in ("8", "a100:8"):
        hosts = allocated({**recorded("slurm-salloc"), "SLURM_GPUS_PER_NODE": asked})
        assert [host.slots for host in hosts] == [8, 8]


def dry_run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run `node --dry-run` under a recorded environment."""
    command = ("-m", "rackrun", "./run-node", "--dry-run", *args, "catdog")
    path = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}
    return warm.run(*command, start=warm.Launcher, env={**path, **recorded(name)})


def test_a_dry_run_shows_what_was_found_and_from_where():
    """Each value with the variable that it comes from, then the plan; JSON has the same."""
    output = dry_run("slurm-step-2", "--nproc", "4")
    assert output.returncode == 0, output.stderr
    assert "node: 2 (SLURM_NODEID)" in output.stdout
    assert "master: n1 (SLURM_STEP_NODELIST)" in output.stdout
    assert "12 ranks" in output.stdout and "ranks 8-11" in output.stdout
    as_json = json.loads(dry_run("slurm-step-2", "--nproc", "4", "--json").stdout)
    assert as_json["found"]["node"] == {"value": 2, "origin": "SLURM_NODEID"}
    assert as_json["plan"]["world_size"] == 12
    assert [host["node"] for host in as_json["plan"]["hosts"]] == [2]
