"""What happened to hosts in an attempt, kept here and on the hosts themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from launcher.preflight.replies import believed
from launcher.remote import history, probe
from launcher.run.incidents import HEALING_SECONDS, Incident, lines_of
from launcher.run.plan import HostPlan, Plan
from launcher.run.result import Result
from launcher.transport.base import Transport
from launcher.transport.bootstrap import order
from launcher.transport.parallel import each
from launcher.transport.rpc import RpcClient
from rackrun.errors import Problem
from rackrun.shapes import Misshapen

HOST_SECONDS = 10.0


def remember(
    plan: Plan,
    transports: Sequence[Transport],
    result: Result,
    doubtful: Collection[str],
    say: Callable[[str], object],
) -> None:
    """Keep the incidents of a run; hosts in `doubtful` that have done well are so no longer."""
    incidents = dict(result.incidents)
    if result.verdict == "done" and result.seconds >= HEALING_SECONDS:
        well = (Incident(time.time(), "done", run=result.folder.name),)
        incidents |= {host: well for host in doubtful if host not in incidents}
    lines = {host: lines_of(those) for host, those in incidents.items()}
    for host, text in lines.items():
        try:
            history.append(host, text)
        except OSError as error:
            say(f"what happened to {host} is not kept: {history.path_of(host)}: {error.strerror}")
    visits = [
        (host, transport)
        for host, transport in zip(plan.hosts, transports, strict=False)
        if host.name in lines and result.hosts.get(host.name) == "clean"
    ]
    each(lambda visit: tell(*visit, lines[visit[0].name]), visits, seconds=HOST_SECONDS)


def tell(host: HostPlan, transport: Transport, lines: str) -> None:
    """Let a host keep lines about itself, for launches from other machines; it may not answer."""
    first = order(do="remember", name=host.name, lines=lines)
    with suppress(Problem, Misshapen):
        client = RpcClient(transport, probe, host.agent_python, first, HOST_SECONDS)
        try:
            believed("remember", client.reply())
        finally:
            client.close()
