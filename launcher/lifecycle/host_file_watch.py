"""Hosts that are added to the host file while an elastic run goes on.

    the file changes -> read it again -> new hosts -> log in, --sync, ask -> fit -> planned
                            |                |                       |
                            +----------------+-----------------------+--> a line about what is wrong

A thread of its own does that; the supervisor takes what it has found into the run. Nothing that is
wrong with the file or with a new host ends anything: it is said once, and tried again when the file
has changed again. Lines that are removed or changed concern the next launch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from launcher.lifecycle.launch_spec import HostFile, LaunchSpec
from launcher.lifecycle.planning import planned_host
from launcher.preflight.checks import CHECKS, examine, lines_of, warnings
from launcher.preflight.facts import ClusterFacts, gather_facts
from launcher.run.hosts import Host
from launcher.run.job import Job
from launcher.run.plan import Plan, plan_of_added, scratch_folder
from launcher.supervision.agents import AddedHost
from launcher.transport.base import Transport
from rackrun.errors import Problem

LOOK_SECONDS = 2.0
"""Between two looks at the file; one that is being written is read once it has stayed the same."""


class HostFileWatch:
    """Watches the host file of a run; what it finds waits to be taken."""

    def __init__(self, file: HostFile, spec: LaunchSpec, job: Job, plan: Plan) -> None:
        """Count the hosts of the launch as known, also those that it has left out."""
        self.on_added: Callable[[], object] = lambda: None
        """Is called when hosts have become part of the run."""
        self._file = file
        self._spec = spec
        self._job = job
        self._plan = plan
        self._machines = {host.machine for host in (*spec.hosts, *file.listed)}
        self._last_signature: tuple[int, ...] = ()
        """Of the file, when it was read last."""
        self._is_over = threading.Event()
        self._news: queue.SimpleQueue[AddedHost | str] = queue.SimpleQueue()
        self.taken: list[AddedHost] = []
        """The hosts that have become part of the run."""
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> HostFileWatch:
        self._thread.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._is_over.set()

    def take(self) -> list[AddedHost | str]:
        """Return the hosts that were found since the last time, and lines about what is wrong."""
        news = list[AddedHost | str]()
        with suppress(queue.Empty):
            while True:
                news.append(self._news.get_nowait())
        if added := [each for each in news if isinstance(each, AddedHost)]:
            self.taken += added
            self.on_added()
        return news

    def _watch(self) -> None:
        before = _signature(self._file.path)
        while not self._is_over.wait(LOOK_SECONDS):
            now = _signature(self._file.path)
            if now and now == before != self._last_signature:
                self._last_signature = now
                try:
                    hosts = self._file.read()
                    self._take_in([host for host in hosts if host.machine not in self._machines])
                except (Problem, OSError) as error:
                    self._note(str(error))
            before = now

    def _note(self, text: str) -> None:
        for line in text.splitlines():
            self._news.put(f"not added: {line}")

    def _take_in(self, hosts: Sequence[Host]) -> None:
        outcomes = self._file.connect(hosts) if hosts else ()
        reached: list[tuple[Host, Transport]] = []
        for host, outcome in zip(hosts, outcomes, strict=True):
            if isinstance(outcome, Problem):
                self._note(str(outcome))
            else:
                reached.append((host, outcome))
        if not reached:
            return
        fresh = replace(self._spec.settings.queued_now(), wait=False)  # behind all who wait
        spec = replace(
            self._spec,
            hosts=[host for host, _ in reached],
            transports=[transport for _, transport in reached],
            settings=fresh,
        )
        self._file.bring_code(spec, self._news.put)
        with closing(self._facts_beside_a_host_of_the_run(spec)) as cluster:
            self._plan_fit_hosts(cluster, dict(reached))

    def _facts_beside_a_host_of_the_run(self, spec: LaunchSpec) -> ClusterFacts:
        """Return facts about new hosts, behind those of a host that they are compared with."""
        pairs = zip(self._spec.hosts, self._spec.reached, strict=True)
        for host, transport in pairs:
            hosts, transports = (host, *spec.hosts), (transport, *spec.reached)
            cluster = gather_facts(hosts, transports, spec.requirements())
            if cluster.hosts[0].error is None:
                return cluster
            cluster.close()
        raise Problem("no host of the run answers")

    def _plan_fit_hosts(self, cluster: ClusterFacts, transport_of: dict[Host, Transport]) -> None:
        settings, run_folder = self._spec.settings, self._job.folder.path.name
        rows = examine(cluster, CHECKS, settings.ignored_checks)
        for facts in cluster.hosts[1:]:
            label = facts.host.label
            rows_of_host = [row for row in rows if row.host == label]
            refused = lines_of([row for row in rows_of_host if row.level == "refused"])
            if not refused:
                ranks = sum(host.processes for host in self._plan.hosts)
                ranks += facts.host.processes(facts["look"]["gpus"])
                if why := cluster.requirements.task.growth_problem(self._plan.world_size, ranks):
                    refused = [f"{label}: {why}"]
            if refused:
                self._note("\n".join(refused))
                continue
            for line in warnings(rows_of_host):
                self._news.put(f"warning: {line}")
            scratch = scratch_folder(self._plan.run_id, len(self._plan.hosts))
            planned = planned_host(
                facts, cluster, settings.jobs.runs / run_folder, settings, scratch
            )
            host_plan = plan_of_added(self._job, self._plan, planned)
            self._plan = self._plan.with_host(host_plan)
            self._machines.add(facts.host.machine)
            self._news.put(AddedHost(facts.host, host_plan, transport_of[facts.host]))


def _signature(path: Path) -> tuple[int, ...]:
    # An editor may replace the file (inode), or write it in place (size, time).
    with suppress(OSError):
        status = path.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino
    return ()
