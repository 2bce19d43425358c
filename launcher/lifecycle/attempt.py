"""One attempt of a run from end to end: agents, supervision, output."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rackrun.errors import Problem
from rackrun.launcher.output.console import start_line
from rackrun.launcher.output.log_files import write_result
from rackrun.launcher.output.run_output import RunOutput, StartReader
from rackrun.launcher.preflight.gpus import suspects
from rackrun.launcher.preflight.replies import Gpus, checked_reply
from rackrun.launcher.run.job import Job
from rackrun.launcher.run.plan import HostPlan, Plan
from rackrun.launcher.run.result import Result
from rackrun.launcher.supervision.agents import AgentGroup
from rackrun.launcher.supervision.signals import STOP_SIGNAL, SignalQueue
from rackrun.launcher.supervision.supervisor import Supervisor
from rackrun.launcher.transport.base import Transport
from rackrun.launcher.transport.parallel import each
from rackrun.launcher.transport.rpc import RpcClient
from rackrun.signals import ended_by_a_signal
from rackrun.terminal import one_line

if TYPE_CHECKING:
    from rackrun.launcher.supervision.peers import Peers

GPU_SECONDS = 20.0  # nvidia-smi takes seconds on a host with many GPUs


@dataclass(frozen=True)
class Attempt:
    """One attempt, on hosts that are fit for it."""

    job: Job
    plan: Plan
    transports: Sequence[Transport]
    """The ways to the plan's hosts, in its order."""

    @property
    def hosts(self) -> list[tuple[Transport, HostPlan]]:
        """The plan's hosts, and the ways to them."""
        return list(zip(self.transports, self.plan.hosts, strict=True))


def supervise(
    attempt: Attempt,
    output: RunOutput,
    signals: SignalQueue,
    peers: Peers | None = None,
    versions: str = "",
    fit_again: Callable[[], Collection[str]] | None = None,
    is_followed: Callable[[Result], bool] | None = None,
    probes: Sequence[RpcClient | None] = (),
) -> Result:
    """Start the plan of an attempt, and supervise it to its end.

    `signals` must be installed, so that the attempt gets a result whatever arrives; the caller
    finds there whether one asked for the end. `peers` are the launchers of the other nodes, if each
    node has its own. `versions` are those of the hosts' torch and driver, for the first line.
    `fit_again` and `is_followed` are explained at `Supervisor`. `probes` on the hosts, if any,
    become the agents, which saves a login to each.
    """
    job, plan = attempt.job, attempt.plan
    output.begin(job, plan)
    if not plan.task and peers is None:  # a task's rank 0 tells more
        output.note(start_line(plan, versions, job.folder.path))
    agents = AgentGroup(plan, attempt.transports, probes)
    supervisor = Supervisor(job, agents, output, peers, signals, fit_again, is_followed)
    result = supervisor.supervise()
    output.end_attempt()
    if result.verdict == "failed":
        try:
            with ended_by_a_signal(STOP_SIGNAL), ended_by_a_signal():
                _report_sick_gpus(attempt, result, output)
        except KeyboardInterrupt:
            signals.add(signal.SIGINT)  # the result stays that of the attempt
    return result


def _report_sick_gpus(attempt: Attempt, result: Result, output: RunOutput) -> None:
    # A GPU that fell off the bus shows itself as any exception of CUDA: its host is asked. The
    # others may not answer, or are still being cleaned up.
    pairs = [
        (host, transport)
        for transport, host in attempt.hosts
        if host.gpus and result.hosts[host.name] == "clean"
    ]
    outcomes = each(lambda pair: _gpu_problems(*pair), pairs, seconds=GPU_SECONDS)
    for (host, _), problems in zip(pairs, outcomes, strict=True):
        if problems and not isinstance(problems, Problem):
            output.note(f"{host.name}: probable cause: {one_line(problems)}")


def _gpu_problems(host: HostPlan, transport: Transport) -> str:
    with closing(RpcClient(transport, host.agent_python, GPU_SECONDS)) as client:
        return suspects(checked_reply(client.call(Gpus.order_name), Gpus, host.name))


def run(
    job: Job,
    plan: Plan,
    transports: Sequence[Transport],
    start_reader: StartReader,
    peers: Peers | None = None,
) -> Result:
    """Make the only attempt of a run; once its ranks have ended, no signal changes the result."""
    attempt = Attempt(job, plan, transports)
    signals = SignalQueue()
    with signals.installed(), RunOutput(job, start_reader) as output:
        result = supervise(attempt, output, signals, peers).with_attempts(None)
        output.note(write_result(job.folder, result))
        output.note_result(result)
        output.end(result)
    return result
