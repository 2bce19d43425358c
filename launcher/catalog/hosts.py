"""The runs that hosts know of: detached ones that began there, attached ones while they run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rackrun.errors import Problem
from rackrun.launcher.catalog.listed import ListedRun, task_of
from rackrun.launcher.detached.locate import Reached, each_in_time, run_manager_on
from rackrun.launcher.detached.replies import HostRuns, LivingAgent, RunFacts
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.transport.base import Transport
from rackrun.runs import name_of


def runs_on(
    hosts: Sequence[Host], transports: Sequence[Transport | Problem]
) -> tuple[list[ListedRun], list[Problem]]:
    """Return the runs of all hosts that answer, the newest first, and the others' errors."""
    outcomes = each_in_time(_asked, list(zip(hosts, transports, strict=True)))
    errors = [outcome for outcome in outcomes if isinstance(outcome, Problem)]
    answered = [
        (host.label, outcome)
        for host, outcome in zip(hosts, outcomes, strict=True)
        if not isinstance(outcome, Problem)
    ]
    detached = [run for host, reply in answered for run in _detached(host, reply)]
    agents = [(host, agent) for host, reply in answered for agent in reply.agents]
    return [*detached, *_attached(agents)], errors


def _asked(pair: Reached) -> HostRuns:
    host, transport = pair
    with run_manager_on(transport, host.python) as client:
        return client.parsed(client.call("list"), HostRuns)


def _detached(host: str, reply: HostRuns) -> Iterator[ListedRun]:
    for run in reply.runs:
        summary = run.summary
        if summary is not None and summary.hosts[:1] == (host,):  # homes may be shared
            yield ListedRun(
                run=summary.run,
                name=summary.name,
                task=summary.task,
                hosts=summary.hosts,
                state=_state_of(run),
                exit_code=run.end,
                step=run.step,
                age_seconds=round(max(0.0, time.time() - summary.at), 1),
                folder=f"{host}:{run.folder}" if run.folder else "",
                detached=True,
            )


def _state_of(run: RunFacts) -> str:
    # the controller first: while it lives, the end of the record is no verdict yet
    if run.stopped:
        return "stopped"
    if run.alive:
        return "running"
    if run.end is None:
        return "killed"
    return run.finish.verdict if run.finish else "failed"


def _attached(agents: Sequence[tuple[str, LivingAgent]]) -> Iterator[ListedRun]:
    # one entry for the agents of a run, whichever hosts they are on
    for run in dict.fromkeys(agent.run for _, agent in agents):
        living = [(host, agent) for host, agent in agents if agent.run == run]
        first = living[0][1]
        yield ListedRun(
            run=run,
            name=name_of(first.folder.rpartition("/")[2]),
            task=task_of(first.command),
            hosts=tuple(host for host, _ in living),
            state="running",
            exit_code=None,
            step=None,
            age_seconds=max(agent.seconds for _, agent in living),
            folder=f"{living[0][0]}:{first.folder}",
            detached=False,
        )
