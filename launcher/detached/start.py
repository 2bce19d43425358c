"""`--detach`: start a run that needs neither this machine nor this terminal any more.

    1  check every host, as for any run
    2  run manager on the first host: write the launcher's code, start a controller
    3  relays on all others: they call the controller, and stay
    4  "go": the controller checks, plans and runs; remember the run's id here
    5  print the id, and wait until every rank has taken a step

Nothing is left running when one of the first four steps fails.
"""

from __future__ import annotations

import secrets
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rackrun.commands import called
from rackrun.contract.tasks import PLATFORM, TASKS
from rackrun.launcher.detached.controller import RunOrder
from rackrun.launcher.detached.entries import result_of
from rackrun.launcher.detached.known_runs import remember
from rackrun.launcher.detached.locate import RUN_BYTES, run_manager_on
from rackrun.launcher.detached.replies import RunFacts, RunSummary, StartReply
from rackrun.launcher.errors import HostError, HostLost, HostUnreachable, PreflightRefused
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec
from rackrun.launcher.lifecycle.planning import preflight, refuse_ranks
from rackrun.launcher.output.console import last_line, say
from rackrun.launcher.preflight.facts import ClusterFacts
from rackrun.launcher.remote import relay, run_manager
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.transport.base import Transport
from rackrun.launcher.transport.certificate import new_key
from rackrun.launcher.transport.parallel import all_or_raise, each
from rackrun.launcher.transport.rpc import Reply, RpcClient
from rackrun.signals import ended_by_a_signal
from rackrun.terminal import clean_lines

_GATHER_SECONDS = 30.0
_POLL_SECONDS = 0.5
_NOT_RUNNING = ("connecting", "starting", "stopping", "lost", "failed")


def start_detached(spec: LaunchSpec, config: str, running_seconds: float | None) -> int:
    """Start the run, print its id, and return 0 once every rank has taken its first step.

    `config`: an ssh_config file, empty for the default one. `running_seconds`: how long ranks that
    report no steps have to run instead; None: every rank reports them; 0: do not wait.
    If the run ends before that, return its exit code. Ctrl-C only ends the wait.
    """
    # Until the end of this block, the launch keeps its place in the queue for busy hosts.
    with preflight(spec) as cluster:
        active = len(spec.restart_state.active())
        refuse_ranks(replace(cluster, hosts=cluster.hosts[:active]))  # spares have no ranks yet
        cluster.unlock()  # the controller locks the hosts itself
        run = _hand_over(spec, config, cluster)
        sys.stdout.write(f"{run}\n")
        sys.stdout.flush()
        return 0 if running_seconds == 0 else _wait(run, spec, running_seconds)


def _hand_over(spec: LaunchSpec, config: str, cluster: ClusterFacts) -> str:
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
        relay_args = {"run": run, "address": address, "port": port, "key": order.key}
        calls = list(zip(hosts[1:], transports[1:], tokens, basics[1:], strict=True))
        all_or_raise(each(partial(_start_relay, relay_args), calls))
        _call(client, hosts[0], "ready")
        name = spec.work.name
        # Before "go": a launcher that is killed in between may leave a record of a run that never
        # began, but no run whose hosts are not known here.
        refusal = remember(
            run,
            hosts,
            jobs.runs,
            config,
            name=jobs.name or name,
            task=name,
            resume=jobs.resume_command(""),
            settings=jobs.settings,
        )
        if refusal:
            say(refusal)
        _call(client, hosts[0], "go")
    return run


def start_controller(client: RpcClient, order: RunOrder, python: str, workdir: str) -> int:
    """Start the controller, and return the port at which it awaits the relays."""
    jobs = order.settings.jobs
    summary = RunSummary(
        run=order.run,
        name=jobs.name or order.work.name,
        hosts=tuple(host.label for host in order.hosts),
        checkpoint_seconds=jobs.limits.checkpoint_seconds,
        at=time.time(),
        task=order.work.name,
    )
    reply = _call(
        client,
        order.hosts[0],
        "start",
        summary=asdict(summary),
        python=python,
        workdir=workdir,
        code=sources(),
        order=order.plain,
    )
    return reply.port


def _start_relay(args: Mapping[str, Any], target: tuple[Host, Transport, str, Reply]) -> None:
    host, transport, token, facts = target
    with closing(RpcClient(transport, relay, facts["python"])) as client:
        _call(client, host, "stay", token=token, **args)


def _call(client: RpcClient, host: Host, question: str, **arguments: object) -> StartReply:
    outcome = client.parsed(client.call(question, **arguments), StartReply)
    if outcome.error:
        # a host could not be reached; on a controller's behalf, 69 says the same of another host
        kind = HostUnreachable if outcome.code == HostUnreachable.exit_code else PreflightRefused
        why = clean_lines(outcome.error)
        raise kind(f"{host.label}: no detached run could be started: {why}")
    return outcome


def sources() -> dict[str, str]:
    """Return the code that a controller needs: path below the repository -> text."""
    ours = Path(__file__).parents[2]
    others = {*PLATFORM, *TASKS} - {"launcher"}  # a controller imports none of them
    paths = [*ours.rglob("*.py"), *(ours / "launcher").rglob("*.py")]
    return {
        str(path.relative_to(ours.parent)): path.read_text()
        for path in paths
        if path.relative_to(ours).parts[0] not in others
    }


def _wait(run: str, spec: LaunchSpec, running_seconds: float | None) -> int:
    what = "the first step" if running_seconds is None else f"{running_seconds:g} s"
    say(f"waiting for {what} of every rank; Ctrl-C leaves the run running")
    come_back = f"to see it: {called('attach')} {run}; to end it: {called('stop')} {run}"
    try:
        with ended_by_a_signal():
            facts = _wait_for_first_step(run, spec, running_seconds)
    except KeyboardInterrupt:
        say(f"not waited for, the run continues; {come_back}")
        return 128 + signal.SIGINT
    except HostError as error:
        raise type(error)(f"{error}; {come_back}") from None
    if facts.end is None:
        say(f"detached; {come_back}")
        return 0
    ending = clean_lines(facts.error)
    if not facts.error and facts.finish:
        result = result_of(facts.finish, Path(facts.finish.folder))
        ending = last_line(replace(result, log=None))  # the log is on that host
    say(f"run {run} has ended: {ending}")
    say(f"its output: {called('logs')} {run}")
    return facts.end


def _wait_for_first_step(run: str, spec: LaunchSpec, running_seconds: float | None) -> RunFacts:
    host, running_since = spec.hosts[0], float("inf")
    with run_manager_on(spec.reached[0], host.python) as client:
        while True:
            facts = client.parsed(client.call("find", run=run), RunFacts)
            if facts.end is not None:
                return facts
            if not facts.alive:
                raise HostLost(f"{host.label}: the controller of run {run} has died")
            hosts, now = facts.live.hosts, time.monotonic()
            all_run = bool(hosts) and all(host.state not in _NOT_RUNNING for host in hosts)
            # a restart starts the time again
            running_since = min(running_since, now) if all_run else float("inf")
            has_run = running_seconds is not None and now - running_since >= running_seconds
            if facts.step or has_run:
                return facts
            time.sleep(_POLL_SECONDS)
