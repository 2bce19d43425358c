"""`rackrun node`: one node's part of a run, started once per node by a scheduler.

The scheduler determines which node this is (`schedulers`), the nodes agree on the rest
(`node_agreement`), and each launcher supervises its own agent. Output and exit codes are those
of `./run-ssh`.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType

from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.launcher.commands.node_agreement import LOOPBACK, job_for, meet, processes, slots_of
from rackrun.launcher.commands.parse import read, refuse_shared
from rackrun.launcher.commands.settings import MACHINE_CHECKS, NODE_HEAD, NodeOptions
from rackrun.launcher.errors import HostLost
from rackrun.launcher.lifecycle.session import run
from rackrun.launcher.lifecycle.task_check import (
    check_task_options,
    refuse_cache,
    refuse_missing_packages,
)
from rackrun.launcher.lifecycle.this_machine import planned
from rackrun.launcher.output.console import say
from rackrun.launcher.output.screen import shown_here
from rackrun.launcher.preflight.checks import CHECKS
from rackrun.launcher.preflight.examine import examine, refusal, warnings
from rackrun.launcher.preflight.facts import Requirements, gather_facts
from rackrun.launcher.rendezvous.gather import Agreement, Rendezvous
from rackrun.launcher.run.hosts import THIS_MACHINE, Host
from rackrun.launcher.run.job import Work, is_on_cpu
from rackrun.launcher.run.plan import Plan, describe, make_plan
from rackrun.launcher.run.result import Result
from rackrun.launcher.schedulers import Placement, Sourced, find_placement
from rackrun.launcher.settings_file import SettingsFile
from rackrun.launcher.supervision.peers import Peers
from rackrun.launcher.transport.local import LocalTransport, free_port, gpu_count
from rackrun.run_folder import RunFolder, folder_name
from rackrun.signals import handle, ignore
from rackrun.units import plural

OPTIONS = NodeOptions


def main(args: Sequence[str], again: SettingsFile | None = None) -> int:
    """Run the command line, or a run `again`; return the exit code."""
    line = read("node", NodeOptions, NODE_HEAD, args, again)
    options, work = line.options, line.work
    if work is None:
        raise UsageError(f"nothing to run; type for example: {called('node')} catdog")
    placement = with_free_port(placement_here(options, os.environ))
    if options.dry_run:
        show(placement, work, options)
        return 0
    signal.signal(signal.SIGUSR1, _end_before_the_start)  # the scheduler wants the node back
    with line.naming_the_file():
        return _launch_node(placement, work, options, line.again(work)).exit_code


def _end_before_the_start(number: int, frame: FrameType | None) -> None:
    raise HostLost("stopped before all nodes had joined; type the same command again")


def placement_here(options: NodeOptions, environment: Mapping[str, str]) -> Placement:
    """Return the placement from the environment, overridden by options; raises UsageError."""
    placement = find_placement(environment)
    if options.master:
        placement = replace(placement, master=Sourced(options.master, "--master"))
    if options.port:
        placement = replace(placement, port=Sourced(options.port, "--port"))
    if options.nproc:
        placement = replace(placement, processes=Sourced(options.nproc, "--nproc"))
    elif options.slots:
        slots = slots_of(options.slots, placement.nodes)
        if placement.node.value < len(slots):
            placement = replace(
                placement, processes=Sourced(slots[placement.node.value], "--slots")
            )
    placement.check()
    return placement


def with_free_port(placement: Placement) -> Placement:
    """Return a single node's placement with a port that is free now, unless one was given.

    Several jobs on this machine would otherwise use the same port.
    """
    if placement.nodes.value > 1 or placement.port.origin in ("--port", "MASTER_PORT"):
        return placement
    return replace(placement, port=Sourced(free_port(), "free here"))


def show(placement: Placement, work: Work, options: NodeOptions) -> None:
    """Print what was detected, from which variable, and what would run here."""
    detected, plan = detected_in(placement, work, options)
    if options.json:
        text = json.dumps({"found": detected, "plan": asdict(plan)}, indent=2)
    else:
        text = f"{_detected_text(detected)}\n\n{describe(plan)}"
    sys.stdout.write(f"{text}\n")


def detected_in(
    placement: Placement, work: Work, options: NodeOptions
) -> tuple[dict[str, object], Plan]:
    """Return the placement as plain data, and the plan for it, without asking other nodes."""
    # an assumption, for the plan that is shown: at a launch, each node reports its own number
    slots = (
        slots_of(options.slots, placement.nodes)
        if options.slots
        else (processes(placement, options).value,) * placement.nodes.value
    )
    folder = RunFolder((options.runs / folder_name(options.name or work.name)).resolve())
    names = tuple(f"node-{node}" for node in range(placement.nodes.value))
    agreement = Agreement(secrets.token_hex(16), folder.path.name, names, slots)
    address = placement.master.value if placement.nodes.value > 1 else LOOPBACK
    plan = plan_for(placement, work, Rendezvous(agreement, address, address, {}), options)
    plan = plan.part(placement.node.value)
    return {**asdict(placement), "processes": asdict(processes(placement, options))}, plan


def _detected_text(detected: Mapping[str, object]) -> str:
    lines = [f"platform: {detected['platform']}"]
    for name, part in detected.items():
        if isinstance(part, dict):
            value = "-" if part["value"] == "" else part["value"]
            lines.append(f"{name.replace('_', ' ')}: {value} ({part['origin']})")
    return "\n".join(lines)


def _launch_node(
    placement: Placement, work: Work, options: NodeOptions, again: tuple[str, ...] = ()
) -> Result:
    with check_task_options(work, "node") as refuse:
        needs = refuse_shared(work, refuse())
    trackers = () if placement.node.value else needs.trackers  # trackers run beside rank 0
    refuse_cache(needs)
    refuse_missing_packages(replace(needs, trackers=trackers), sys.executable)
    refuse_unfit(work, options)
    with ExitStack() as servers:
        meeting = meet(placement, work, options, servers, needs)
        plan = plan_for(placement, work, meeting, options).part(placement.node.value)
        (host,) = plan.hosts
        if host.processes > host.cores:
            say(
                f"{plural(host.processes, 'rank')} share {plural(host.cores, 'core')} here; give"
                " the node more, as with srun --cpus-per-task=N"
            )
        job = job_for(placement, work, meeting.agreement, options, again)
        transports = [LocalTransport(host.name)]
        show = shown_here(options.plain)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # while it lasts, the run handles it itself
        several = placement.nodes.value > 1
        peers = servers.enter_context(Peers(placement.node.value, meeting)) if several else None
        result = run(job, plan, transports, show, peers=peers)
        # When the first node has ended, a scheduler ends the others: their exit code stays.
        handle((signal.SIGTERM, signal.SIGHUP), ignore)
        return result


def refuse_unfit(work: Work, options: NodeOptions) -> None:
    """Make those checks of `./run-ssh` that need no other node and no lock."""
    name, folder = socket.gethostname(), str(Path.cwd())
    host = Host(THIS_MACHINE, python=sys.executable, label=name)
    needs = Requirements(folder, environment=options.environment, on_cpu=is_on_cpu(work))
    cluster = gather_facts([host], [LocalTransport(name)], replace(needs, chooses=True))
    cluster.close()
    checks = [check for check in CHECKS if check.name in MACHINE_CHECKS]
    rows = examine(cluster, checks, options.ignore_check)
    if error := refusal(cluster, checks, rows):
        raise error
    for line in warnings(rows):
        say(f"warning: {line}")


def plan_for(placement: Placement, work: Work, meeting: Rendezvous, options: NodeOptions) -> Plan:
    """Return the plan of the whole run; for other nodes, only what all nodes agreed on."""
    agreement = meeting.agreement
    folder = str((options.runs / agreement.folder).resolve())
    has_gpus = gpu_count(options.environment) > 0
    common = planned("", meeting.address, 0, folder, signalled_together=True, has_gpus=has_gpus)
    facts = [
        replace(common, name=name, processes=slots)
        for name, slots in zip(agreement.names, agreement.slots, strict=True)
    ]
    facts[0] = replace(facts[0], address=meeting.master)
    return make_plan(job_for(placement, work, agreement, options), facts, placement.port.value)
