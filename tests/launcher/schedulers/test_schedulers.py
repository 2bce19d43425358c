"""The same plan under every scheduler, and none where the node rank is unknown."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from rackrun.errors import UsageError
from rackrun.launcher.commands.node import detected_in, placement_here, with_free_port
from rackrun.launcher.commands.settings import NodeOptions
from rackrun.launcher.run.job import Command
from rackrun.launcher.schedulers import find_placement
from rackrun.launcher.schedulers.slurm import allocated, expand
from tests.lab import warm

RECORDED = Path(__file__).parent / "recorded"
GOLDEN = json.loads((RECORDED / "golden.json").read_text())
ALONE = {"NNODES": "1"}
WORK = Command(("python", "train.py"))


def recorded(name: str) -> dict[str, str]:
    """Return an environment as a platform sets it; the file's first line names its origin."""
    lines = (RECORDED / f"{name}.env").read_text().splitlines()
    assert lines[0].startswith("# ")
    return dict(line.split("=", 1) for line in lines[1:])


def planned(name: str) -> Any:
    """Return the node's placement and plan, or why it would start nothing."""
    environment = recorded(name)
    try:
        nodes = find_placement(environment).nodes.value
        options = NodeOptions(slots="2,1,4" if nodes == 3 else "")
        result, plan = detected_in(placement_here(options, environment), WORK, options)
    except UsageError as error:
        return str(error)
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


NAMES = sorted(path.stem for path in RECORDED.glob("*.env"))


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_of_every_recorded_environment_is_known(name, monkeypatch):
    """Rank, size, master and port, each with its origin; three nodes have slots 2, 1 and 4."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert planned(name) == GOLDEN[name]


def test_nothing_is_recorded_in_vain():
    """There is a plan for each environment, and there are fourteen and more of them."""
    assert sorted(GOLDEN) == NAMES
    assert len(NAMES) >= 14


@pytest.mark.parametrize("name", NAMES)
def test_no_node_of_several_ever_calls_itself(name):
    """Where the first node is not known there is an error, and never localhost."""
    if isinstance(GOLDEN[name], dict) and not GOLDEN[name]["nodes"].startswith("1 "):
        assert not GOLDEN[name]["master"].startswith(("localhost", "127.", "("))


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
    _, plan = detected_in(single, WORK, NodeOptions())
    assert f"--master-port={single.port.value}" in plan.hosts[0].torchrun
    for name, options, origin in (
        ("by-hand", NodeOptions(port=4000), "--port"),
        ("slurm-step-2", NodeOptions(), "SLURM_JOB_ID, SLURM_STEP_ID"),
    ):
        given = placement_here(options, recorded(name))
        assert with_free_port(given) == given and given.port.origin == origin


def test_an_unknown_scheduler_is_no_single_node():
    """Each node of Flux or jsrun would run alone: what was seen is named, and what to set."""
    seen = {"FLUX_TASK_RANK": "1", "JSM_NAMESPACE_RANK": "1", "TERM_PROGRAM": "x"}
    with pytest.raises(UsageError) as error:
        find_placement(seen)
    assert "may be the one of FLUX_TASK_RANK, JSM_NAMESPACE_RANK);" in str(error.value)
    assert "set NNODES, NODE_RANK and MASTER_ADDR on every node" in str(error.value)


def test_steps_of_one_job_do_not_meet():
    """Two at the same time, as in a sweep: another port, and another name of the job."""
    step = recorded("slurm-step-2")
    one, other = (find_placement({**step, "SLURM_STEP_ID": number}) for number in ("0", "1"))
    assert one.port.value != other.port.value and one.job != other.job


@pytest.mark.parametrize(
    "options, name, line",
    [
        (NodeOptions(nproc=5), "slurm-step-gpus", "--nproc 5: more than SLURM_GPUS_ON_NODE=4"),
        (NodeOptions(nproc=9), "ngc-3", "--nproc 9: more than NGC_GPUS_PER_NODE=8"),
        (NodeOptions(slots="2,1"), "by-hand", "--slots 2,1: 2 nodes, but the run has 3 (NNODES)"),
        (NodeOptions(slots="2,x,1"), "by-hand", "--slots 2,x,1: type numbers of processes"),
        (NodeOptions(slots="9" * 23 + ",1,1"), "by-hand", "none above 1024"),
        (NodeOptions(nproc=10**23), "by-hand", "more than 1024 processes"),
        (NodeOptions(nproc=-1), "by-hand", "--nproc -1: cannot start fewer than one process"),
        (NodeOptions(port=70000), "by-hand", "--port=70000: not a port"),
    ],
)
def test_a_size_that_does_not_fit_is_refused(options, name, line):
    """More than the scheduler gave, or for other nodes than there are."""
    with pytest.raises(UsageError) as error:
        placement_here(options, recorded(name))
    assert line in str(error.value)


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


LONG = "a" * 64


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("slurm-salloc", {"SLURM_JOB_NODELIST": "a[1-999999999]"}, "more than 100000 hosts"),
        ("slurm-salloc", {"SLURM_JOB_NODELIST": "a[1-9999]b[1-9999]"}, "more than 100000"),
        ("slurm-salloc", {"SLURM_JOB_NODELIST": "a[1"}, "no closing bracket"),
        ("slurm-salloc", {"SLURM_JOB_NODELIST": "a[9-1]"}, "a range is written"),
        ("slurm-salloc", {"SLURM_JOB_NODELIST": "-oProxyCommand=x"}, "not a list of Slurm's"),
        ("slurm-salloc", {"SLURM_JOB_NODELIST": "-a"}, "does not begin with a dash"),
        ("slurm-salloc", {"SLURM_JOB_NODELIST": "a b"}, "not a list of Slurm's"),
        ("slurm-salloc", {"SLURM_JOB_NODELIST": "\x1b[31m"}, "not a list of Slurm's"),
        ("slurm-salloc", {"SLURM_JOB_NODELIST": LONG}, "is not a host name"),
        ("slurm-salloc", {"SLURM_JOB_NODELIST": "n1,n1"}, "already"),
        ("slurm-salloc", {"SLURM_JOB_NODELIST": "n[1-999]," * 9 + "m"}, "n1 is on line 1 already"),
        ("slurm-salloc", {"SLURM_GPUS_PER_NODE": "9" * 5000}, "1 to 1024 processes"),
        ("slurm-salloc", {"SLURM_HET_SIZE": "9" * 5000}, "not a whole number"),
        ("slurm-salloc", {"SLURM_HET_SIZE": "8" + "0" * 12}, "SLURM_JOB_NODELIST_HET_GROUP_0"),
        ("slurm-uneven-tasks", {"SLURM_TASKS_PER_NODE": "4(x999999999)"}, "as Slurm writes it"),
        ("slurm-uneven-tasks", {"SLURM_TASKS_PER_NODE": "4(x"}, "as Slurm writes it"),
        ("slurm-uneven-tasks", {"SLURM_TASKS_PER_NODE": "x"}, "as Slurm writes it"),
        ("slurm-uneven-tasks", {"SLURM_TASKS_PER_NODE": "4"}, "1 nodes, but SLURM_JOB_NODELIST"),
        ("slurm-uneven-tasks", {"SLURM_TASKS_PER_NODE": "0,1,2"}, "1 to 1024 processes"),
        ("slurm-step-2", {"SLURM_STEP_NODELIST": "a[1-999999999]"}, "more than 100000 hosts"),
        ("slurm-step-2", {"SLURM_STEP_TASKS_PER_NODE": "1(x999999999)"}, "as Slurm writes it"),
        ("slurm-step-2", {"SLURM_JOB_ID": "9" * 5000}, "not a whole number"),
        ("by-hand", {"NNODES": "999999999"}, "a run has 1 to 100000 nodes"),
        ("by-hand", {"NNODES": "9" * 5000}, "not a whole number"),
        ("by-hand", {"NPROC_PER_NODE": "99999999999"}, "a node has 1 to 1024 processes"),
        ("by-hand", {"MASTER_ADDR": f"{LONG}.example"}, "no address"),
        ("by-hand", {"MASTER_ADDR": "\x1b[31m"}, "no address"),
        ("ngc-3", {"NGC_MASTER_ADDR": "", "NGC_JOB_ID": LONG}, "no address"),
        ("ngc-3", {"NGC_GPUS_PER_NODE": "9" * 5000}, "not a whole number"),
    ],
    ids=range(29),
)
def test_an_environment_that_cannot_be_is_refused_at_once(name, changes, line):
    """Ranges without end, names that are none, numbers of 5,000 digits: a line, no hang."""
    environment = {**recorded(name), **changes}
    began = time.monotonic()
    with pytest.raises(UsageError) as error:
        placement_here_or_allocated(environment, name)
    assert line in str(error.value)
    assert len(str(error.value)) < 300
    assert time.monotonic() - began < 5


def placement_here_or_allocated(environment: dict[str, str], name: str) -> None:
    """Find the placement as `--slurm` does, or as `node` does."""
    if name in ("slurm-salloc", "slurm-uneven-tasks"):
        allocated(environment)
    placement_here(NodeOptions(), environment)


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
    command = ("-m", "rackrun.launcher", "node", "--dry-run", *args, "catdog")
    path = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}
    return warm.run(*command, start=warm.Launcher, env={**path, **recorded(name)})


def test_a_dry_run_shows_what_was_found_and_from_where():
    """Each value with the variable that it comes from, then the plan; JSON has the same."""
    output = dry_run("slurm-step-2", "--slots", "2,1,4")
    assert output.returncode == 0, output.stderr
    assert "node: 2 (SLURM_NODEID)" in output.stdout
    assert "master: n1 (SLURM_STEP_NODELIST)" in output.stdout
    assert "7 ranks" in output.stdout and "ranks 3-6" in output.stdout
    as_json = json.loads(dry_run("slurm-step-2", "--slots", "2,1,4", "--json").stdout)
    assert as_json["found"]["node"] == {"value": 2, "origin": "SLURM_NODEID"}
    assert as_json["plan"]["world_size"] == 7
    assert [host["node"] for host in as_json["plan"]["hosts"]] == [2]


def test_a_batch_shell_gets_the_command_to_type():
    """It is never mistaken for the first of many nodes."""
    output = dry_run("slurm-batch")
    assert output.returncode == 64
    assert "type: srun --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1" in output.stderr
    assert "Traceback" not in output.stderr
