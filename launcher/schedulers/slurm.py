"""Slurm: the placement of a task in a step.

Only a step has a placement. In a batch script SLURM_NODEID is 0 and SLURM_NNODES counts the whole
job, so a plain `python` there looks like the first of many nodes; inside `salloc` it is not even on
one of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.launcher.run.hosts import MOST_HOSTS, MOST_SLOTS, Host, HostsFileError, parse_hosts
from rackrun.launcher.schedulers.placement import Placement, Sourced, Variables
from rackrun.terminal import one_line
from rackrun.units import whole_number

FIRST_PORT, PORTS = 20000, 10000  # below those that the kernel gives to connections
STEP_PORTS = 997  # between two steps of a job
FIRST_SPECIAL_STEP = 0xFFFFFFF0  # the batch script, salloc's shell, the container of all steps
LISTED = re.compile(r"[A-Za-z0-9_.,\[\]-]+")
REPEATED = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")
SRUN = f"srun --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1 {called('node')} ..."


def find_placement(variables: Variables) -> Placement | None:
    """Return the placement of this task; None outside Slurm."""
    if "SLURM_JOB_ID" not in variables:
        return None
    has_step = {"SLURM_STEP_ID", "SLURM_STEP_NUM_NODES"} <= variables.set.keys()
    if not has_step or variables.number("SLURM_STEP_ID").value >= FIRST_SPECIAL_STEP:
        hint = f"{called('ssh')} --slurm ... reaches its nodes from here"
        raise UsageError(f"in a Slurm job, but not in a step; type: {SRUN}; {hint}")
    tasks = variables.text("SLURM_STEP_TASKS_PER_NODE")
    if set(repeated(tasks)) != {"1"}:  # torchrun starts the ranks
        several = f"{tasks.origin}={tasks.value}: node is started once per node"
        raise UsageError(f"{several}; type: {SRUN}")
    nodes = variables.number("SLURM_STEP_NUM_NODES")
    node = variables.number("SLURM_NODEID")
    names = variables.text("SLURM_STEP_NODELIST")
    hosts = expand(names.value, names.origin)
    if len(hosts) != nodes.value:
        raise UsageError(f"{names.origin}={names.value} is not {nodes.origin}={nodes.value} nodes")
    _check_name(node, hosts, variables)
    job, step = variables.number("SLURM_JOB_ID"), variables.number("SLURM_STEP_ID")
    # Steps of one job may run side by side, as in a sweep, and so do neighboring jobs.
    port = FIRST_PORT + (job.value + STEP_PORTS * step.value) % PORTS
    gpus = variables.count("SLURM_GPUS_ON_NODE")
    return Placement(
        platform="Slurm",
        node=node,
        nodes=nodes,
        master=Sourced(hosts[0], names.origin),
        port=variables.port("MASTER_PORT", otherwise=Sourced(port, f"{job.origin}, {step.origin}")),
        processes=gpus,
        most_processes=gpus,
        job=f"{job.value}.{step.value}",
    )


def _check_name(node: Sourced[int], hosts: list[str], variables: Variables) -> None:
    """Refuse a node that is not where the list has it: the variables were changed."""
    this_name = variables.find("SLURMD_NODENAME")
    if this_name and node.value < len(hosts) and hosts[node.value] != this_name.value:
        message = (
            f"{node.origin}={node.value} is {hosts[node.value]}, but this is {this_name.value}"
        )
        raise UsageError(f"{message}; do not set SLURM_ variables yourself")


def allocated(environment: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the nodes of this process's allocation, all parts of a heterogeneous one.

    Slots are the GPUs that were asked for on each node, or the tasks; where neither was given they
    are found out from the node.
    """
    variables = Variables(environment)
    if "SLURM_JOB_ID" not in variables:
        started = f"salloc --nodes=2 {called('ssh')} --slurm ..."
        raise UsageError(f"--slurm: in no allocation; type: {started}")
    parts = range(variables.number("SLURM_HET_SIZE").value if "SLURM_HET_SIZE" in variables else 0)
    suffixes = (f"_HET_GROUP_{part}" for part in parts) if parts else ("",)
    return tuple(host for suffix in suffixes for host in part_of(variables, suffix))


def part_of(variables: Variables, suffix: str) -> list[Host]:
    """Return the nodes of one part of the allocation."""
    listed = variables.text(f"SLURM_JOB_NODELIST{suffix}")
    names = expand(listed.value, listed.origin)
    gpus = variables.find(f"SLURM_GPUS_PER_NODE{suffix}")
    if gpus:  # such as 8, or a100:8
        number = gpus.value.rpartition(":")[2]
        count = slots_of(number, gpus) if number.isdecimal() else None
        return [Host(name, slots=count) for name in names]
    slots: list[int | None] = [None] * len(names)
    if f"SLURM_NTASKS{suffix}" in variables:  # else a task per node means only that none was asked
        tasks = variables.text(f"SLURM_TASKS_PER_NODE{suffix}")
        slots = [slots_of(count, tasks) for count in repeated(tasks)]
        if len(slots) != len(names):
            message = f"{tasks.origin}={one_line(tasks.value)[:60]}"
            raise UsageError(f"{message}: {len(slots)} nodes, but {listed.origin} has {len(names)}")
    return [Host(name, slots=count) for name, count in zip(names, slots, strict=True)]


def slots_of(text: str, origin: Sourced[str]) -> int:
    """Return the number of ranks for one node."""
    count = whole_number(text, MOST_SLOTS)
    if not count:
        message = f"{origin.origin}={one_line(origin.value)[:60]}"
        raise UsageError(f"{message}: a node has 1 to {MOST_SLOTS} processes")
    return count


def repeated(counts: Sourced[str]) -> list[str]:
    """Return `2(x3),1` repeated: 2, 2, 2, 1."""
    counts_of_nodes: list[str] = []
    for part in counts.value.split(","):
        match = REPEATED.fullmatch(part)
        if match is None or len(counts_of_nodes) + int(match[2] or 1) > MOST_HOSTS:
            message = f"{counts.origin}={one_line(counts.value)[:60]}"
            raise UsageError(f"{message}: not as Slurm writes it, such as 2(x3),1")
        counts_of_nodes += [match[1]] * int(match[2] or 1)
    return counts_of_nodes


def expand(names: str, origin: str) -> list[str]:
    """Return the names in a node list of Slurm's, such as `a1,rack[1-2]n[01-03,7]`.

    Its patterns are those of hosts.txt, and are held to the same grammar and limits.
    """
    if not LISTED.fullmatch(names):
        raise UsageError(f"{origin}={one_line(names)[:60]}: not a list of Slurm's")
    patterns = re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", names)
    try:
        hosts = parse_hosts("\n".join(patterns), origin)
    except HostsFileError as error:
        raise UsageError(f"{origin}: {error.faults[0].text}") from None
    if again := next((host.name for host in hosts if host.slots), ""):
        raise UsageError(f"{origin}: {again} is there already")
    return [host.name for host in hosts]
