"""One attempt of a run from end to end: agents, supervision, output; and the end of a run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from rackrun.errors import Problem
from rackrun.launcher.output.console import last_line, start_line
from rackrun.launcher.output.log_files import write_result, write_run_page
from rackrun.launcher.output.on_event import EventCommand
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
from rackrun.launcher.transport.bootstrap import order
from rackrun.launcher.transport.parallel import each
from rackrun.launcher.transport.rpc import RpcClient
from rackrun.signals import ended_by_a_signal
from rackrun.terminal import one_line

if TYPE_CHECKING:
    from rackrun.launcher.supervision.peers import Peers

GPU_SECONDS = 20.0  # nvidia-smi takes seconds on a host with many GPUs


def supervise(
    job: Job,
    plan: Plan,
    transports: Sequence[Transport],
    output: RunOutput,
    alerts: EventCommand,
    signals: SignalQueue,
    peers: Peers | None = None,
    versions: str = "",
    returned: Callable[[], Collection[str]] | None = None,
    goes_on: Callable[[Result], bool] | None = None,
    probes: Sequence[RpcClient | None] = (),
) -> Result:
    """Start a plan, and supervise it to its end; the transports are in the order of its hosts.

    `alerts` gets what happens. `signals` are installed, so that a run with a plan gets a result;
    afterwards they say whether one has asked for the end. `peers` look after the other hosts of a
    run of which this plan is a part; `versions` are those of the hosts' torch and driver, for the
    first line. `returned` names hosts for which the attempt ends with an epoch. Where another
    attempt follows, as `goes_on` says, silent hosts are not waited for. `probes` on the hosts, if
    any, become the agents: that saves a login to each.
    """
    output.begin(job, plan)
    if not plan.task and peers is None:  # a task's rank 0 tells more
        output.note(start_line(plan, versions, job.folder.path))
    agents = AgentGroup(plan, transports, probes)
    supervisor = Supervisor(job, agents, output, peers, alerts, signals, returned, goes_on)
    result = supervisor.supervise()
    output.end_attempt()
    if result.verdict == "failed":
        try:
            with ended_by_a_signal(STOP_SIGNAL), ended_by_a_signal():
                _report_sick_gpus(plan, transports, result, output)
        except KeyboardInterrupt:
            signals.add(signal.SIGINT)  # the result stays that of the attempt
    return result


def _report_sick_gpus(
    plan: Plan, transports: Sequence[Transport], result: Result, output: RunOutput
) -> None:
    # A GPU that fell off the bus shows itself as any exception of CUDA: its host is asked. The
    # others may not answer, or are still being cleaned up.
    pairs = [
        (host, transport)
        for host, transport in zip(plan.hosts, transports, strict=True)
        if host.gpus and result.hosts[host.name] == "clean"
    ]
    outcomes = each(lambda pair: _gpu_problems(*pair), pairs, seconds=GPU_SECONDS)
    for (host, _), problems in zip(pairs, outcomes, strict=True):
        if problems and not isinstance(problems, Problem):
            output.note(f"{host.name}: probable cause: {one_line(problems)}")


def _gpu_problems(host: HostPlan, transport: Transport) -> str:
    first = order(do=Gpus.question)
    with closing(RpcClient(transport, host.agent_python, first, GPU_SECONDS)) as client:
        return suspects(checked_reply(client.reply(), Gpus, host.name))


def run(
    job: Job,
    plan: Plan,
    transports: Sequence[Transport],
    start_reader: StartReader,
    peers: Peers | None = None,
) -> Result:
    """Run a plan once from end to end; once the ranks have ended, no signal changes how."""
    alerts = EventCommand(() if job.folder.node else job.options.on_event_args)
    signals = SignalQueue()
    with signals.installed(), RunOutput(job, start_reader) as output:
        result = supervise(job, plan, transports, output, alerts, signals, peers).after(None)
        output.note(write_result(job.folder, result))
        output.write_result(result)
        close_run(output, result, alerts)
    return result


def close_run(output: RunOutput, result: Result, alerts: EventCommand) -> None:
    """Draw the page of a run whose result is written; tell the user's command of the end, and wait.

    What fails with that command is reported.
    """
    output.note(write_run_page(result.folder, output.plan.task))
    alerts.send("end", result.folder, last_line(result), result.host, result.rank, result)
    try:
        with ended_by_a_signal():
            alerts.wait(output.note)
    except KeyboardInterrupt:
        alerts.abandon()
        output.note("--on-event: not waiting for the command")
    for problem in alerts.problems():
        output.note(problem)
    output.end(result)
