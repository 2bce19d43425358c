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
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import FrameType

from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.launcher.commands.node_agreement import job_for, meet, processes
from rackrun.launcher.commands.parse import read, refuse_shared
from rackrun.launcher.commands.settings import NODE_HEAD, NodeOptions
from rackrun.launcher.errors import HostLost
from rackrun.launcher.lifecycle.attempt import run
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec
from rackrun.launcher.lifecycle.planning import planned_host, preflight
from rackrun.launcher.lifecycle.task_check import check_task_options
from rackrun.launcher.lifecycle.this_machine import LOOPBACK
from rackrun.launcher.output.console import say
from rackrun.launcher.output.run_printer import printed_here
from rackrun.launcher.preflight.checks import OF_MACHINE
from rackrun.launcher.remote.network import interface_of
from rackrun.launcher.rendezvous.gather import Agreement, Rendezvous
from rackrun.launcher.run.hosts import THIS_MACHINE, Host
from rackrun.launcher.run.job import Work
from rackrun.launcher.run.plan import Plan, describe, make_plan
from rackrun.launcher.run.planned_host import PlannedHost
from rackrun.launcher.run.result import Result
from rackrun.launcher.run.settings import HostOptions, Options
from rackrun.launcher.schedulers import Placement, Sourced, find_placement
from rackrun.launcher.settings_file import SettingsFile, settings_text
from rackrun.launcher.supervision.peers import Peers
from rackrun.launcher.transport.local import LocalTransport, free_port
from rackrun.run_folder import join_run_folder
from rackrun.units import plural


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
        return _launch_node(placement, work, options).exit_code


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
    spec = spec_of(placement, work, options)
    detected, plan = detected_in(placement, spec, options, this_node(spec))
    if options.json:
        text = json.dumps({"found": detected, "plan": asdict(plan)}, indent=2)
    else:
        text = f"{_detected_text(detected)}\n\n{describe(plan)}"
    sys.stdout.write(f"{text}\n")


def detected_in(
    placement: Placement, spec: LaunchSpec, options: NodeOptions, here: PlannedHost
) -> tuple[dict[str, object], Plan]:
    """Return the placement as plain data, and the plan for it, without asking other nodes."""
    # an assumption, for the plan that is shown: at a launch, each node reports its own number
    slots = (processes(placement, options).value,) * placement.nodes.value
    names = tuple(f"node-{node}" for node in range(placement.nodes.value))
    folder = spec.planned_folder.path.name
    agreement = Agreement(secrets.token_hex(16), folder, names, slots)
    address = placement.master.value if placement.nodes.value > 1 else LOOPBACK
    meeting = Rendezvous(agreement, address, address, {})
    plan = plan_for(placement, spec, meeting, here).part(placement.node.value)
    return {**asdict(placement), "processes": asdict(processes(placement, options))}, plan


def _detected_text(detected: Mapping[str, object]) -> str:
    lines = [f"platform: {detected['platform']}"]
    for name, part in detected.items():
        if isinstance(part, dict):
            value = "-" if part["value"] == "" else part["value"]
            lines.append(f"{name.replace('_', ' ')}: {value} ({part['origin']})")
    return "\n".join(lines)


def _launch_node(placement: Placement, work: Work, options: NodeOptions) -> Result:
    with check_task_options(work, "node") as refuse:
        needs = refuse_shared(work, refuse())
    trackers = () if placement.node.value else needs.trackers  # trackers run beside rank 0
    spec = spec_of(placement, work, options)
    spec = spec.with_needs(replace(needs, trackers=trackers))
    here = this_node(spec)
    with ExitStack() as servers:
        meeting = meet(placement, spec, options, servers)
        plan = plan_for(placement, spec, meeting, here).part(placement.node.value)
        (host,) = plan.hosts
        if host.processes > host.cores:
            say(
                f"{plural(host.processes, 'rank')} share {plural(host.cores, 'core')} here; give"
                " the node more, as with srun --cpus-per-task=N"
            )
        job = job_for(placement, spec, meeting.agreement)
        join_run_folder(job.folder.path, options.share)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # while it lasts, the run handles it itself
        several = placement.nodes.value > 1
        peers = servers.enter_context(Peers(placement.node.value, meeting)) if several else None
        result = run(job, plan, spec.reached, printed_here(options.plain), peers)
        # When the first node has ended, a scheduler ends the others: their exit code stays. A
        # handler would not do: Python takes its handlers away some time before it has ended.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        return result


def spec_of(placement: Placement, work: Work, options: NodeOptions) -> LaunchSpec:
    """Return this node's part of a run as a launch on this machine, which passes the same checks.

    What node 0 serves to the others is known only once they have met.
    """
    common = {field.name: getattr(options, field.name) for field in fields(Options)}
    ignored = tuple(name for name in options.ignore_check if name in OF_MACHINE)
    name = socket.gethostname()
    host = Host(THIS_MACHINE, slots=processes(placement, options).value, address=LOOPBACK)
    return LaunchSpec(
        work,
        HostOptions(**common, python=sys.executable, ignore_check=ignored),
        settings=settings_text("node", options, work),
        is_here=True,
        hosts=[replace(host, label=name)],
        transports=[LocalTransport(name)],
        pending={"shards": "served by node 0"} if options.serving.serve else {},
    )


def this_node(spec: LaunchSpec) -> PlannedHost:
    """Return what a plan needs to know of this node; raise a HostError where it is not fit."""
    with preflight(spec) as cluster:
        return planned_host(cluster.hosts[0], cluster, Path(), "")


def plan_for(
    placement: Placement, spec: LaunchSpec, meeting: Rendezvous, here: PlannedHost
) -> Plan:
    """Return the plan of the whole run; for other nodes, only what all nodes agreed on."""
    agreement = meeting.agreement
    common = replace(
        here,
        folder=str((spec.options.runs / agreement.folder).resolve()),
        address=meeting.address,
        interface=interface_of(meeting.address),
        signalled_together=True,
    )
    facts = [
        replace(common, name=name, processes=slots)
        for name, slots in zip(agreement.names, agreement.slots, strict=True)
    ]
    facts[0] = replace(facts[0], address=meeting.master)
    return make_plan(job_for(placement, spec, agreement), facts, placement.port.value)
