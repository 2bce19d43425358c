"""After a failed run: its hosts are asked whether their GPUs are the cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress

from rackrun.errors import Problem
from rackrun.launcher.preflight.gpus import suspects
from rackrun.launcher.preflight.replies import checked_reply
from rackrun.launcher.remote import probe
from rackrun.launcher.run.plan import HostPlan, Plan
from rackrun.launcher.run.result import Result
from rackrun.launcher.transport.base import Transport
from rackrun.launcher.transport.bootstrap import order
from rackrun.launcher.transport.parallel import each
from rackrun.launcher.transport.rpc import RpcClient
from rackrun.shapes import Misshapen
from rackrun.terminal import one_line

GPU_SECONDS = 20.0  # nvidia-smi takes seconds on a host with many GPUs


def sick_gpus(
    plan: Plan, transports: Sequence[Transport], result: Result
) -> Iterator[tuple[str, str]]:
    """Yield each host with a sick GPU, and what is wrong; none for hosts that do not answer."""

    def problems_of(host: HostPlan, transport: Transport) -> str:
        first = order(do="gpus")
        with (
            suppress(Misshapen),
            closing(RpcClient(transport, probe, host.agent_python, first, GPU_SECONDS)) as client,
        ):
            return suspects(checked_reply("gpus", client.reply()))
        return ""

    # The others may not answer, or are still being cleaned up.
    pairs = [
        (host, transport)
        for host, transport in zip(plan.hosts, transports, strict=False)
        if host.gpus and result.hosts.get(host.name) == "clean"
    ]
    outcomes = each(lambda pair: problems_of(*pair), pairs, seconds=GPU_SECONDS)
    for (host, _), problems in zip(pairs, outcomes, strict=True):
        if problems and not isinstance(problems, Problem):
            yield host.name, one_line(problems)
