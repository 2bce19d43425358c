"""The agreement of the nodes of a run: they connect to node 0, and each checks what it receives."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from ipaddress import ip_address
from urllib.parse import urlsplit

from rackrun.errors import UsageError
from rackrun.launcher.commands.node_work import refuse_other_work, work_here
from rackrun.launcher.commands.settings import NodeOptions
from rackrun.launcher.errors import HostUnreachable, PreflightRefused
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec
from rackrun.launcher.lifecycle.restart_policy import resumed
from rackrun.launcher.lifecycle.serving import SERVED_PATH, served
from rackrun.launcher.lifecycle.this_machine import LOOPBACK
from rackrun.launcher.output.console import say
from rackrun.launcher.remote.gpus import gpus_of_ranks
from rackrun.launcher.rendezvous.gather import Agreement, NodeInfo, Rendezvous, gather, join
from rackrun.launcher.run.job import Job, Work, data_of, run_name, with_data
from rackrun.launcher.schedulers import Placement, Sourced
from rackrun.run_folder import RunFolder, file_name
from rackrun.runs import name_of


def meet(
    placement: Placement, spec: LaunchSpec, options: NodeOptions, servers: ExitStack
) -> Rendezvous:
    """Wait until every node is there, and agree with them; node 0 may serve the data."""
    work = spec.work
    node_info = NodeInfo(
        node=placement.node.value,
        nodes=placement.nodes.value,
        processes=processes(placement, options).value,
        # the name of the node in Slurm, where several nodes may share a machine
        name=file_name(os.environ.get("SLURMD_NODENAME") or socket.gethostname()),
        job=file_name(placement.job) if placement.job else "",
        resume=_newest_run(options, work) if options.auto_resume else "",
        **({"work": work_here(work, options)} if placement.nodes.value > 1 else {}),
    )

    def agree(members: Sequence[NodeInfo], address: str) -> Agreement:
        _check_private(address, options)
        refuse_other_work(members, work, options.ignore_check)
        slots = tuple(member.processes for member in members)
        if why := spec.needs.rank_problem(sum(slots)):
            raise UsageError(why)
        name = run_name(options, work)
        resumable = [each.resume for each in members if name_of(each.resume) == name]
        return Agreement(
            run_id=secrets.token_hex(16),
            folder=spec.new_folder().path.name,
            names=_unique([member.name for member in members]),
            slots=slots,
            resume=max(resumable, default="") if options.auto_resume else "",
            data=_serve(work, address, options, servers),
        )

    if node_info.nodes == 1:
        return Rendezvous(agree([node_info], LOOPBACK), LOOPBACK, LOOPBACK, {})
    port = placement.port.value
    if node_info.node == 0:
        return gather(node_info, port, options.wait_seconds, agree, say)
    meeting = join(node_info, _address_of(placement), port, options.wait_seconds, say)
    check_agreement(meeting, options, work)
    return meeting


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    # Each node has a folder of logs: names that appear twice get their node rank.
    return tuple(
        f"{name}-{node}" if names.count(name) > 1 else name for node, name in enumerate(names)
    )


def processes(placement: Placement, options: NodeOptions) -> Sourced[int]:
    """Return the number of ranks to start here."""
    if placement.processes:
        return placement.processes
    gpus = gpus_of_ranks(dict(options.environment))
    return Sourced(gpus, "one per GPU") if gpus else Sourced(1, "no GPU")


def _check_private(address: str, options: NodeOptions) -> None:
    is_global = ip_address(address.partition("%")[0]).is_global
    if is_global and "public" not in options.ignore_check:
        where = f"nodes would meet at the public address {address}"
        raise PreflightRefused(
            f"{where}; name a private one with --master, or --ignore-check public"
        )


def check_agreement(meeting: Rendezvous, options: NodeOptions, work: Work) -> None:
    """Accept from node 0 only what the options here allow, about its run and from its machine."""
    _check_private(meeting.master, options)
    agreed = meeting.agreement
    is_ours = options.auto_resume and name_of(agreed.resume) == run_name(options, work)
    if agreed.resume and not is_ours:
        hint = "type the same --name and --auto-resume on every node"
        raise HostUnreachable(f"node 0 would resume {agreed.resume}; {hint}")
    if agreed.data and not (options.serving.serve and _served_by(agreed.data, meeting, options)):
        hint = "type the same --serve and --serve-address on every node"
        raise HostUnreachable(f"node 0 would have shards read from {agreed.data}; {hint}")


def _served_by(data: str, meeting: Rendezvous, options: NodeOptions) -> bool:
    # This URL from node 0 decides where every rank of this node reads. It may have no more than
    # scheme, address, port, the path of a run's server and a version, and the address must be one
    # that this node knows as node 0's.
    try:
        url = urlsplit(data)
        plain = f"{url.scheme}://{url.netloc}{url.path}" == data and url.port is not None
    except ValueError:
        return False
    hosts = {meeting.master, options.serving.serve_address.lower()} - {""}
    return bool(
        plain
        and SERVED_PATH.fullmatch(url.path)
        and "@" not in url.netloc
        and url.scheme in ("http", "https")
        and url.hostname in hosts
    )


def _serve(work: Work, address: str, options: NodeOptions, servers: ExitStack) -> str:
    serving = options.serving
    if not serving.serve:
        return ""
    serving = replace(serving, serve_address=serving.serve_address or address)
    return data_of(servers.enter_context(served(work, serving, [])))


def job_for(placement: Placement, spec: LaunchSpec, agreement: Agreement) -> Job:
    """Return the job that all nodes have agreed on."""
    runs, work = spec.options.runs, spec.work
    if agreement.data:
        work = with_data(work, agreement.data)
    if agreement.resume:
        work = resumed(work, str(runs / agreement.resume))
    folder = RunFolder((runs / agreement.folder).resolve(), node=placement.node.value)
    return replace(spec.job(folder), work=work, run_id=agreement.run_id)


def _newest_run(options: NodeOptions, work: Work) -> str:
    name = run_name(options, work)
    runs = {path.parents[1].name for path in options.runs.glob(f"*-{name}/checkpoints/*.pt")}
    return max((run for run in runs if name_of(run) == name), default="")


def _address_of(placement: Placement) -> str:
    # Slurm may know an address for a name that no resolver has.
    if placement.platform != "Slurm" or placement.master.origin.startswith("--"):
        return placement.master.value
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return placement.master.value
    args = [scontrol, "--oneliner", "show", "node", placement.master.value]
    output = subprocess.run(args, capture_output=True, text=True, check=False).stdout
    fields = dict(field.partition("=")[::2] for field in output.split())
    return fields.get("NodeAddr", placement.master.value)
