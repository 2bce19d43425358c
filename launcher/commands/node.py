"""`python -m launcher node`: one node's share of a run, started once per node by a scheduler.

The scheduler says which node this is (`environments`), the nodes agree on the rest (`rollcall`),
and each launcher looks after its own agent. What is run and returned is as with `./run-ssh`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from launcher.commands.node_settings import NodeOptions
from launcher.commands.parse import is_question, parse, split, work_of
from launcher.errors import HostLost, HostUnreachable, PreflightRefused
from launcher.lifecycle.restart_policy import resumed
from launcher.lifecycle.serving import served
from launcher.lifecycle.session import run
from launcher.output.console import say
from launcher.remote.network import interface_of
from launcher.rendezvous.callers import NodeInfo
from launcher.rendezvous.connection import job_key
from launcher.rendezvous.gather import Agreement, Rendezvous, gather, join
from launcher.run.hosts import MOST_SLOTS
from launcher.run.job import (
    RUN_NAME,
    Job,
    RunFolder,
    Work,
    data_of,
    file_name,
    new_run_folder,
    run_name,
    with_data,
)
from launcher.run.plan import Plan, PlannedHost, describe, make_plan
from launcher.run.result import Result
from launcher.schedulers import Placement, Sourced, find_placement
from launcher.supervision.peers import Peers
from launcher.transport.local import LocalTransport, core_count, free_port, gpu_count
from rackrun.contract import TASKS
from rackrun.errors import UsageError

LOOPBACK = "127.0.0.1"
TIME_LENGTH = len("20260101-120000")  # in the name of a run folder


def main(args: Sequence[str]) -> int:
    """Run what the command line says, and return the exit code."""
    own, rest = split(args, NodeOptions)
    options = parse(NodeOptions, "python -m launcher node", own, description())
    work = work_of(rest)
    if work is None:
        raise UsageError("nothing to run; type for example: python -m launcher node catdog")
    if is_question(work):
        sys.stdout.flush()
        os.execv(sys.executable, work.argv(sys.executable))
    seat = seat_here(options, os.environ)
    if options.dry_run:
        show(seat, work, options)
        return 0
    signal.signal(signal.SIGUSR1, end_before_the_start)
    return launch_node(seat, work, options).exit_code


def end_before_the_start(number: int, frame: FrameType | None) -> None:
    """The scheduler wants the node back while it still waits for others."""
    raise HostLost("told to end before all nodes were there; it may be started again")


def seat_here(options: NodeOptions, environment: Mapping[str, str]) -> Placement:
    """The seat that the environment says, where no option says otherwise; raises UsageError."""
    seat = find_placement(environment)
    if options.master:
        seat = replace(seat, master=Sourced(options.master, "--master"))
    if options.port:
        seat = replace(seat, port=Sourced(options.port, "--port"))
    if options.nproc < 0:
        raise UsageError(f"--nproc {options.nproc}: cannot start fewer than one process")
    if options.nproc > MOST_SLOTS:
        raise UsageError(f"--nproc {options.nproc}: more than {MOST_SLOTS} processes on a node")
    if options.nproc:
        seat = replace(seat, processes=Sourced(options.nproc, "--nproc"))
    elif options.slots:
        slots = slots_of(options.slots, seat.nodes)
        if seat.node.value < len(slots):
            seat = replace(seat, processes=Sourced(slots[seat.node.value], "--slots"))
    seat.check()
    return seat


def slots_of(text: str, nodes: Sourced[int]) -> tuple[int, ...]:
    """The numbers of --slots, one for each node."""
    words = text.split(",")
    if not all(word.isdecimal() and 0 < int(word[:9]) <= MOST_SLOTS for word in words):
        most = f"such as 2,1,4, none above {MOST_SLOTS}"
        raise UsageError(f"--slots {text[:40]}: type numbers of processes, {most}")
    if len(words) != nodes.value:
        here = f"{nodes.value} ({nodes.origin})"
        raise UsageError(f"--slots {text}: {len(words)} nodes, but the run has {here}")
    return tuple(map(int, words))


def show(seat: Placement, work: Work, options: NodeOptions) -> None:
    """What was found, from where, and what would run here."""
    found, plan = found_in(seat, work, options)
    if options.json:
        text = json.dumps({"found": found, "plan": asdict(plan)}, indent=2)
    else:
        text = f"{found_text(found)}\n\n{describe(plan)}"
    sys.stdout.write(f"{text}\n")


def found_in(seat: Placement, work: Work, options: NodeOptions) -> tuple[dict[str, object], Plan]:
    """The seat as plain data, and what would run in it; no other node is asked."""
    slots = expected_slots(seat, options)
    folder = RunFolder((options.runs / run_name(options.name or work.name)).resolve())
    names = tuple(f"node-{node}" for node in range(seat.nodes.value))
    agreement = Agreement(secrets.token_hex(16), folder.path.name, names, slots)
    address = seat.master.value if seat.nodes.value > 1 else LOOPBACK
    plan = plan_for(seat, work, Rendezvous(agreement, address, address, {}), options)
    plan = plan.part(seat.node.value)
    return {**asdict(seat), "processes": asdict(processes(seat))}, plan


def found_text(found: Mapping[str, object]) -> str:
    """A line for each thing that was found."""
    lines = [f"platform: {found['platform']}"]
    for name, part in found.items():
        if isinstance(part, dict):
            value = "-" if part["value"] == "" else part["value"]
            lines.append(f"{name.replace('_', ' ')}: {value} ({part['origin']})")
    return "\n".join(lines)


def expected_slots(seat: Placement, options: NodeOptions) -> tuple[int, ...]:
    """The processes of all nodes, as far as one of them can know: the roll call counts them."""
    if options.slots:
        return slots_of(options.slots, seat.nodes)
    return (processes(seat).value,) * seat.nodes.value


def processes(seat: Placement) -> Sourced[int]:
    """The ranks to start here."""
    if seat.processes:
        return seat.processes
    gpus = gpu_count()
    return Sourced(gpus, "one per GPU") if gpus else Sourced(1, "no GPU")


def launch_node(seat: Placement, work: Work, options: NodeOptions) -> Result:
    """Meet the others, and run this node's share."""
    if seat.nodes.value == 1 and not options.port:
        seat = replace(seat, port=Sourced(free_port(LOOPBACK), "free here"))
    with ExitStack() as servers:
        meeting = meet(seat, work, options, servers)
        plan = plan_for(seat, work, meeting, options).part(seat.node.value)
        job = job_for(seat, work, meeting.agreement, options)
        places = [LocalTransport(plan.hosts[0].name)]
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the run hears it itself, as long as it goes
        if seat.nodes.value == 1:
            return run(job, plan, places, options.plain)
        with Peers(seat.node.value, meeting) as peers:
            return run(job, plan, places, options.plain, peers=peers)


def meet(seat: Placement, work: Work, options: NodeOptions, servers: ExitStack) -> Rendezvous:
    """Wait until every node is there, and agree with them; node 0 may serve the data."""
    own = NodeInfo(
        node=seat.node.value,
        nodes=seat.nodes.value,
        processes=processes(seat).value,
        name=file_name(host_name()),
        job=file_name(seat.job) if seat.job else "",
        resume=newest_run(options, work) if options.auto_resume else "",
    )
    key = job_key(os.environ)

    def agree(members: Sequence[NodeInfo], address: str) -> Agreement:
        check_private(address, options)
        slots = tuple(member.processes for member in members)
        if options.slots and slots != slots_of(options.slots, seat.nodes):
            there = ",".join(map(str, slots))
            raise UsageError(f"--slots {options.slots}, but the nodes start {there} processes")
        folder = new_run_folder(options.runs, options.name or work.name, options.share)
        return Agreement(
            run_id=secrets.token_hex(16),
            folder=folder.path.name,
            names=unique([member.name for member in members]),
            slots=slots,
            resume=max(resumable(member, options, work) for member in members),
            data=serve(work, address, options, servers),
        )

    if own.nodes == 1:
        return Rendezvous(agree([own], LOOPBACK), LOOPBACK, LOOPBACK, {})
    port = seat.port.value
    if own.node == 0:
        return gather(own, port, options.wait_seconds, agree, say, key)
    meeting = join(own, address_of(seat), port, options.wait_seconds, say, key)
    check_agreement(meeting, options, work)
    return meeting


def check_private(address: str, options: NodeOptions) -> None:
    """Refuse to meet where everybody can come, unless that was asked for."""
    if ip_address(address.partition("%")[0]).is_global and not options.ignore_check:
        where = f"nodes would meet at the public address {address}"
        raise PreflightRefused(
            f"{where}; name a private one with --master, or --ignore-check public"
        )


def check_agreement(meeting: Rendezvous, options: NodeOptions, work: Work) -> None:
    """Take from node 0 only what was asked for here, of its own run and from its own machine."""
    check_private(meeting.master, options)
    agreed = meeting.agreement
    name = file_name(options.name or work.name)
    resume_fits = not agreed.resume or (options.auto_resume and is_run_of(agreed.resume, name))
    if not resume_fits:
        raise HostUnreachable(f"node 0 would go on from {agreed.resume}, which is not ours to do")
    if agreed.data and not (options.serving.serve and served_by(agreed.data, meeting, options)):
        hint = "type the same --serve and --serve-address on every node"
        raise HostUnreachable(f"node 0 would have shards read from {agreed.data}; {hint}")


def served_by(data: str, meeting: Rendezvous, options: NodeOptions) -> bool:
    """Whether a URL is that of a server on node 0, as we know its address."""
    try:
        url = urlsplit(data)
        plain = f"{url.scheme}://{url.netloc}/" == data and url.port is not None
    except ValueError:
        return False
    known = {meeting.master, options.serving.serve_address.lower()} - {""}
    return (
        plain
        and "@" not in url.netloc
        and url.scheme in ("http", "https")
        and url.hostname in known
    )


def resumable(member: NodeInfo, options: NodeOptions, work: Work) -> str:
    """The run that a node would go on from, if it is one of this name."""
    fits = options.auto_resume and is_run_of(member.resume, file_name(options.name or work.name))
    return member.resume if fits else ""


def is_run_of(run: str, name: str) -> bool:
    """Whether a run folder is of a run of that name."""
    return bool(re.fullmatch(RUN_NAME, run)) and run[TIME_LENGTH:] == f"-{name}"


def serve(work: Work, address: str, options: NodeOptions, servers: ExitStack) -> str:
    """Serve the data at the address that all nodes know, if told to: the URL."""
    serving = options.serving
    if not serving.serve:
        return ""
    there = replace(serving, serve_address=serving.serve_address or address)
    return data_of(servers.enter_context(served(work, there, [])))


def plan_for(seat: Placement, work: Work, meeting: Rendezvous, options: NodeOptions) -> Plan:
    """The plan of the whole run; of the other nodes it knows only what the roll call says."""
    agreement = meeting.agreement
    here = PlannedHost(
        name="",
        address=meeting.address,
        processes=0,
        python=sys.executable,
        workdir=str(Path.cwd()),
        folder=str((options.runs / agreement.folder).resolve()),
        cores=core_count(),
        interface=interface_of(meeting.address),
        agent_python=sys.executable,
        signalled_together=True,
    )
    facts = [
        replace(here, name=name, processes=slots)
        for name, slots in zip(agreement.names, agreement.slots, strict=True)
    ]
    facts[0] = replace(facts[0], address=meeting.master)
    return make_plan(job_for(seat, work, agreement, options), facts, seat.port.value)


def job_for(seat: Placement, work: Work, agreement: Agreement, options: NodeOptions) -> Job:
    """The job that all nodes have agreed on."""
    if agreement.data:
        work = with_data(work, agreement.data)
    if agreement.resume:
        work = resumed(work, str(options.runs / agreement.resume))
    return Job(
        work,
        RunFolder((options.runs / agreement.folder).resolve(), node=seat.node.value),
        run_id=agreement.run_id,
        environment=options.environment,
        secrets=options.secrets,
        limits=options.limits,
        share=options.share,
    )


def newest_run(options: NodeOptions, work: Work) -> str:
    """The folder name of the newest run of this name that has a checkpoint; empty for none."""
    name = file_name(options.name or work.name)
    found = {path.parents[1].name for path in options.runs.glob(f"*-{name}/checkpoints/*.pt")}
    return max((run for run in found if is_run_of(run, name)), default="")


def host_name() -> str:
    """What people call this node: in Slurm its name there, several may share a machine."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def unique(names: Sequence[str]) -> tuple[str, ...]:
    """The names as names of log folders: those that appear twice get their node rank."""
    return tuple(
        f"{name}-{node}" if names.count(name) > 1 else name for node, name in enumerate(names)
    )


def address_of(seat: Placement) -> str:
    """Where to call node 0; Slurm may know an address for the name that no resolver has."""
    if seat.platform != "Slurm" or seat.master.origin.startswith("--"):
        return seat.master.value
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return seat.master.value
    argv = [scontrol, "--oneliner", "show", "node", seat.master.value]
    told = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    known = dict(word.partition("=")[::2] for word in told.split())
    return known.get("NodeAddr", seat.master.value)


def description() -> str:
    """What stands at the head of the help."""
    return (
        "python -m launcher node [options] TASK [task options] | -- COMMAND: this node's share of a"
        " run, started once per node by Slurm, NGC, Kubernetes or mpirun, or by hand with"
        f" MASTER_ADDR, NNODES and NODE_RANK.\nTasks: {', '.join(TASKS)}."
    )
