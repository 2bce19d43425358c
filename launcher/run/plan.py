"""From a job and the facts about its hosts to what is started on each: pure, and no quoting.

What `--dry-run` prints is what runs: the agent of a host gets the `HostPlan` of that host and
nothing else. Command lines and environments are lists of strings all the way to `execve`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rackrun.launcher.run.job import TRAINING, Job, is_on_cpu, value_in
from rackrun.launcher.run.planned_host import Environment, PlannedHost
from rackrun.launcher.run.torchrun_command import (
    check_environment,
    defaults,
    environment,
    torchrun,
)
from rackrun.terminal import clean_lines
from rackrun.units import plural


@dataclass(frozen=True, kw_only=True)
class HostPlan(PlannedHost):
    """All that happens on one host: what is known of it, and what starts there."""

    node: int
    first_rank: int
    torchrun: tuple[str, ...]
    command: tuple[str, ...]
    """What the shim that torchrun starts runs in its turn, once per rank."""
    environment: Environment
    """Set for torchrun and the ranks, whatever the host had."""
    defaults: Environment
    """Set where the host has nothing of that name."""
    scratch: str
    """The agent's private folder on the host: sockets, pipes, the shim."""
    share: bool = False
    """Other accounts may read the run folder."""


@dataclass(frozen=True)
class Plan:
    """A run, host by host, in node rank order."""

    run_id: str
    world_size: int
    hosts: tuple[HostPlan, ...]
    """All of them; or, for a launcher of one node, those that it looks after."""

    @property
    def task(self) -> str:
        """The task that the ranks train; empty for a command of the user."""
        return next(iter(self._task_words), "")

    @property
    def has_first_rank(self) -> bool:
        """Whether the rank that reports for all is on one of these hosts."""
        return self.hosts[0].first_rank == 0

    @property
    def uses_gpus(self) -> bool:
        """Whether ranks are to use GPUs."""
        return any(host.gpus for host in self.hosts)

    @property
    def own_model(self) -> str:
        """The model of the user's own, MODULE:NAME, that the task trains; else nothing."""
        named = value_in(self._task_words, "--model")
        return named if ":" in named and not named.startswith("timm:") else ""

    @property
    def _task_words(self) -> tuple[str, ...]:
        command = self.hosts[0].command if self.hosts else ()
        program, args = command[1 : 1 + len(TRAINING)], command[1 + len(TRAINING) :]
        return args if program == TRAINING else ()

    def host(self, node: int) -> HostPlan:
        """Return the host with this node rank."""
        return self.hosts[node - self.hosts[0].node]

    def part(self, node: int) -> Plan:
        """Return the part of the plan that the launcher of one node needs."""
        return replace(self, hosts=(self.host(node),))


def make_plan(job: Job, hosts: Sequence[PlannedHost], port: int) -> Plan:
    """Lay the ranks out over the hosts in their order; `port` is free on the first of them."""
    check_environment(job.options.environment)
    world_size = sum(host.processes for host in hosts)
    plans: list[HostPlan] = []
    first_rank = 0
    for node, host in enumerate(hosts):
        plans.append(_host_plan(job, hosts, node, first_rank, port, world_size))
        first_rank += host.processes
    return Plan(job.run_id, world_size, tuple(plans))


def _host_plan(
    job: Job,
    hosts: Sequence[PlannedHost],
    node: int,
    first_rank: int,
    port: int,
    world_size: int,
) -> HostPlan:
    host = hosts[node]
    check_environment(host.env)
    scratch = scratch_folder(job.run_id, node)
    uses_gpus = host.gpus and not is_on_cpu(job.work)
    return HostPlan(
        **vars(host if uses_gpus else replace(host, gpu_model="")),
        node=node,
        first_rank=first_rank,
        torchrun=torchrun(job, hosts, node, port, scratch),
        command=job.work.argv(host.python),
        environment=environment(job, host, world_size, scratch),
        defaults=defaults(host),
        scratch=scratch,
        share=job.options.share,
    )


def scratch_folder(run_id: str, node: int) -> str:
    """Return the private folder of an agent: short, as the path of a socket has 107 bytes."""
    return f"/tmp/rackrun-{run_id}-{node}"


def shown(plan: Plan, as_json: bool) -> str:
    """Return the plan as --dry-run prints it, for people or for programs."""
    return f"{json.dumps(asdict(plan), indent=2) if as_json else describe(plan)}\n"


def describe(plan: Plan) -> str:
    """Return the plan for people: what is started where, as a shell would take it."""
    lines = [f"run {plan.run_id}, {plural(plan.world_size, 'rank')}"]
    for host in plan.hosts:
        last = host.first_rank + host.processes - 1
        ranks = f"rank {last}" if host.processes == 1 else f"ranks {host.first_rank}-{last}"
        lines += [
            f"\nhost {host.node}: {host.name} ({host.address}), {ranks}",
            f"  in {host.workdir}, run folder {host.folder}",
            *((f"  container: {shlex.join(host.container)}",) if host.container else ()),
            f"  torchrun: {shlex.join(host.torchrun)}",
            f"  each rank: {shlex.join(host.command)}",
            *(f"  set: {shlex.quote(f'{name}={value}')}" for name, value in host.environment),
            *(f"  unless set: {shlex.quote(f'{name}={value}')}" for name, value in host.defaults),
        ]
    return clean_lines("\n".join(lines))  # hosts have named folders and interpreters
