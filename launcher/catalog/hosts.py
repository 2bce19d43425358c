"""The runs whose agents live on hosts, whoever started them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rackrun.errors import Problem
from rackrun.launcher.catalog.listed import ListedRun, task_of
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.transport.base import Transport
from rackrun.launcher.viewer.reach import Reached, each_in_time, processes_on
from rackrun.launcher.viewer.replies import HostRuns, LivingAgent
from rackrun.runs import name_of


def runs_on(
    hosts: Sequence[Host], transports: Sequence[Transport | Problem]
) -> tuple[list[ListedRun], list[Problem]]:
    """Return the runs of all hosts that answer, and the others' errors."""
    outcomes = each_in_time(_asked, list(zip(hosts, transports, strict=True)))
    errors = [outcome for outcome in outcomes if isinstance(outcome, Problem)]
    answered = [
        (host.label, outcome)
        for host, outcome in zip(hosts, outcomes, strict=True)
        if not isinstance(outcome, Problem)
    ]
    agents = [(host, agent) for host, reply in answered for agent in reply.agents]
    return list(_runs_of(agents)), errors


def _asked(pair: Reached) -> HostRuns:
    host, transport = pair
    with processes_on(transport, host.python) as client:
        return client.parsed(client.call("list"), HostRuns)


def _runs_of(agents: Sequence[tuple[str, LivingAgent]]) -> Iterator[ListedRun]:
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
        )
