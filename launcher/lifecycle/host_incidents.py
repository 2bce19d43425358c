"""What an attempt shows about its hosts: kept here and there; of a failed one, their sick GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, suppress

from launcher.preflight.gpus import suspects
from launcher.preflight.replies import believed
from launcher.remote import history, probe
from launcher.run.incidents import HEALING_SECONDS, Incident, lines_of
from launcher.run.plan import HostPlan, Plan
from launcher.run.result import Result
from launcher.transport.base import Transport
from launcher.transport.bootstrap import order
from launcher.transport.parallel import each
from launcher.transport.rpc import Reply, RpcClient
from rackrun.errors import Problem
from rackrun.shapes import Misshapen
from rackrun.terminal import one_line

REMEMBER_SECONDS = 10.0
GPU_SECONDS = 20.0  # nvidia-smi takes seconds on a host with many GPUs
BEFORE_SECONDS = 60  # errors that are so much older than the run are of no concern


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

    def tell(host: HostPlan, transport: Transport) -> None:
        """Let the host keep lines about itself, for launches from other machines."""
        first = order(do="remember", name=host.name, lines=lines[host.name])
        with suppress(Problem, Misshapen):  # it may not answer
            _reply("remember", host, transport, first, REMEMBER_SECONDS)

    clean = _clean_hosts(plan, transports, result)
    concerned = [(host, transport) for host, transport in clean if host.name in lines]
    each(lambda pair: tell(*pair), concerned, seconds=REMEMBER_SECONDS)


def sick_gpus(
    plan: Plan, transports: Sequence[Transport], result: Result
) -> Iterator[tuple[str, str]]:
    """Yield each host with a sick GPU, and what is wrong; none for hosts that do not answer."""

    def problems_of(host: HostPlan, transport: Transport) -> str:
        first = order(do="gpus", full=True)
        with suppress(Misshapen):
            reply = _reply("gpus", host, transport, first, GPU_SECONDS)
            return suspects(reply, int(result.seconds) + BEFORE_SECONDS)
        return ""

    clean = _clean_hosts(plan, transports, result)
    pairs = [(host, transport) for host, transport in clean if host.gpus]
    outcomes = each(lambda pair: problems_of(*pair), pairs, seconds=GPU_SECONDS)
    for (host, _), problems in zip(pairs, outcomes, strict=True):
        if problems and not isinstance(problems, Problem):
            yield host.name, one_line(problems)


def _clean_hosts(
    plan: Plan, transports: Sequence[Transport], result: Result
) -> list[tuple[HostPlan, Transport]]:
    # Others may not answer, or are still being cleaned up.
    pairs = zip(plan.hosts, transports, strict=False)
    return [pair for pair in pairs if result.hosts.get(pair[0].name) == "clean"]


def _reply(
    question: str, host: HostPlan, transport: Transport, first: bytes, seconds: float
) -> Reply:
    """Return the reply of a new probe to its first order; raise Problem or Misshapen."""
    with closing(RpcClient(transport, probe, host.agent_python, first, seconds)) as client:
        return believed(question, client.reply())
