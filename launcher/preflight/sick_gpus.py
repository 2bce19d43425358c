"""The GPUs of a run that has failed, read once more: a sick one is the probable cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.preflight.gpus import suspects
from launcher.preflight.replies import believed
from launcher.remote import probe
from launcher.run.plan import HostPlan, Plan
from launcher.run.result import Result
from launcher.transport.base import Transport
from launcher.transport.bootstrap import order
from launcher.transport.parallel import each
from launcher.transport.rpc import RpcClient
from rackrun.errors import Problem
from rackrun.shapes import Misshapen
from rackrun.terminal import one_line

LOOK_SECONDS = 20.0
BEFORE_SECONDS = 60  # errors that are so much older than the run are of no concern

Visit = tuple[HostPlan, Transport]


def sick_gpus(
    plan: Plan, transports: Sequence[Transport], result: Result
) -> Iterator[tuple[str, str]]:
    """Yield each host with a sick GPU, and what is wrong; none for hosts that do not answer."""
    pairs = [
        (host, transport)
        for host, transport in zip(plan.hosts, transports, strict=True)
        if host.gpus and result.hosts.get(host.name) == "clean"
    ]
    seconds = int(result.seconds) + BEFORE_SECONDS
    outcomes = each(lambda pair: _suspects(pair, seconds), pairs, seconds=LOOK_SECONDS)
    for (host, _), problems in zip(pairs, outcomes, strict=True):
        if problems and not isinstance(problems, Problem):
            yield host.name, one_line(problems)


def _suspects(pair: Visit, seconds: int) -> str:
    """Return what is wrong with the GPUs of a host, and was not long before the run."""
    host, transport = pair
    first = order(do="gpus", full=True)
    client = RpcClient(transport, probe, host.agent_python, first, LOOK_SECONDS)
    try:
        return suspects(believed("gpus", client.reply()), seconds)
    except Misshapen:
        return ""
    finally:
        client.close()
