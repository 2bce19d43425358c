"""`--detach`: start a run that needs neither this machine nor this terminal any more.

    1  check every host, as for any run
    2  run manager on the first host: write the launcher's code, start a controller
    3  relays on all others: they call the controller, and stay
    4  "go": the controller checks, plans and runs; remember the run's id here

Nothing is left running when one of these steps fails.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from launcher.detached.controller import RunOrder
from launcher.detached.known_runs import remember
from launcher.detached.locate import RUN_BYTES
from launcher.detached.replies import RunSummary, StartReply, parsed_reply
from launcher.errors import HostUnreachable, PreflightRefused
from launcher.lifecycle.launch_spec import LaunchSpec
from launcher.lifecycle.planning import preflight, refuse_ranks
from launcher.output.console import say
from launcher.preflight.facts import ClusterFacts
from launcher.remote import relay, run_manager
from launcher.run.hosts import Host
from launcher.transport.base import Transport
from launcher.transport.certificate import new_key
from launcher.transport.parallel import all_or_raise, each
from launcher.transport.rpc import Reply, RpcClient
from rackrun.terminal import clean_lines

_GATHER_SECONDS = 30.0
_PACKAGES = ("launcher", "rackrun")  # what a controller imports on its host


@contextmanager
def detached(spec: LaunchSpec, config: str) -> Iterator[str]:
    """Start a run and yield its id. `config`: an ssh_config file, empty for the default one.

    Until the end of the block it keeps its place in the queue for busy hosts.
    """
    with preflight(spec) as cluster:
        active = spec.restart_state.active()
        refuse_ranks(replace(cluster, hosts=cluster.hosts[: len(active)]))
        cluster.unlock()  # the controller locks the hosts itself
        yield _handed_over(spec, config, cluster)


def _handed_over(spec: LaunchSpec, config: str, cluster: ClusterFacts) -> str:
    """Start the controller and the relays; return the id of the run."""
    hosts, transports, jobs = spec.hosts, spec.reached, spec.settings.jobs
    basics, address = [facts["look"] for facts in cluster.hosts], cluster.master
    run = secrets.token_hex(RUN_BYTES)
    tokens = [secrets.token_hex(16) for _ in hosts[1:]]
    order = RunOrder(
        run,
        spec.work,
        spec.settings,
        tuple(hosts),
        address,
        key=new_key(run),
        tokens=tuple(tokens),
        gather_seconds=_GATHER_SECONDS,
    )
    # with a container image, the Python that was found is in the image and not on the host
    python = "python3" if spec.settings.needs.image else basics[0]["python"]
    with closing(RpcClient(transports[0], run_manager, python)) as client:
        port = start_controller(client, order, python, basics[0]["workdir"])
        call = {"run": run, "address": address, "port": port, "key": order.key}
        calls = list(zip(hosts[1:], transports[1:], tokens, basics[1:], strict=True))
        all_or_raise(each(partial(start_relay, call), calls))
        checked(hosts[0].label, client.call("ready"))
        name = spec.work.name
        about = (jobs.name or name, name, jobs.resume_command(""), jobs.settings)
        if refusal := remember(run, hosts, jobs.runs, config, *about):
            say(refusal)
        checked(hosts[0].label, client.call("go"))
    return run


def start_controller(client: RpcClient, order: RunOrder, python: str, workdir: str) -> int:
    """Start the controller, and return the port at which it awaits the relays."""
    labels, jobs = tuple(host.label for host in order.hosts), order.settings.jobs
    summary = RunSummary(
        run=order.run,
        name=jobs.name or order.work.name,
        hosts=labels,
        checkpoint_seconds=jobs.limits.checkpoint_seconds,
        at=time.time(),
        task=order.work.name,
    )
    reply = client.call(
        "start",
        summary=asdict(summary),
        python=python,
        workdir=workdir,
        code=sources(),
        order=order.plain,
    )
    return checked(labels[0], reply).port


def start_relay(call: Mapping[str, Any], target: tuple[Host, Transport, str, Reply]) -> None:
    """Start a relay on a host, which calls the controller and stays."""
    host, transport, token, facts = target
    with closing(RpcClient(transport, relay, facts["python"])) as client:
        checked(host.label, client.call("stay", token=token, **call))


def checked(name: str, reply: Reply) -> StartReply:
    """Return the reply; raise HostError when it is an error."""
    outcome = parsed_reply(name, reply, StartReply)
    if outcome.error:
        kind = HostUnreachable if outcome.code == HostUnreachable.exit_code else PreflightRefused
        why = clean_lines(outcome.error)
        raise kind(f"{name}: no detached run could be started: {why}")
    return outcome


def sources() -> dict[str, str]:
    """Return the code that a controller needs: path below the repository -> text."""
    root = Path(__file__).parents[2]
    paths = (path for package in _PACKAGES for path in (root / package).rglob("*.py"))
    return {str(path.relative_to(root)): path.read_text() for path in paths}
