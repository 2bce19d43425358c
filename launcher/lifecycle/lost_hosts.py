"""Lost hosts of a run: what is left there is ended, and they are checked until they are fit again.

That goes on beside the next attempt. A host that is clean and passes the preflight takes part from
the next restart on, or from the end of an epoch if the run continues on fewer hosts than it began
with.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from rackrun.errors import Problem
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec
from rackrun.launcher.lifecycle.planning import preflight
from rackrun.launcher.preflight.facts import NO_FACTS
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.run.plan import HostPlan
from rackrun.launcher.run.result import Result
from rackrun.launcher.supervision.agents import AgentClient, EventQueue
from rackrun.launcher.supervision.shutdown import CLEANUP_SECONDS
from rackrun.launcher.transport.base import Transport
from rackrun.launcher.transport.parallel import each

CHECK_SECONDS = 30.0  # between two checks of a host: each logs in there and starts a Python


class LostHosts(AbstractContextManager["LostHosts"]):
    """Checks lost hosts until its context ends, each in a thread of its own."""

    def __init__(self, spec: LaunchSpec) -> None:
        """Take the launch, whose hosts have all been reached."""
        self._spec = spec
        self._is_over = threading.Event()
        self._threads = dict[str, threading.Thread]()
        self._passed = queue.SimpleQueue[str]()
        self._fit = set[str]()
        self._agents = dict[str, AgentClient]()
        """Those of hosts that were lost in an attempt, and have no part in the present one."""
        self._clean = set[str]()
        """The hosts of these agents on which nothing is left."""

    def __exit__(self, *reason: object) -> None:
        self._is_over.set()

    def add(self, hosts: Sequence[tuple[Transport, HostPlan]], result: Result) -> None:
        """Take the hosts that were lost in an attempt on these, which another one follows."""
        for transport, plan in hosts:
            if result.hosts[plan.name] != "clean":
                self._agents[plan.name] = AgentClient(transport, None, plan, EventQueue())

    def check(self, spec: LaunchSpec, hosts: Sequence[Host], active: Collection[str]) -> None:
        """Check these hosts of the launch, the lost ones now; the active ones are clean."""
        self._spec = spec
        self._agents = {k: agent for k, agent in self._agents.items() if k not in active}
        self._clean.difference_update(active)
        self._fit.intersection_update(host.label for host in hosts)
        for host in hosts:
            thread = self._threads.get(host.label)
            if host.label not in self._fit and not (thread and thread.is_alive()):
                thread = threading.Thread(target=self._check_until_fit, args=[host], daemon=True)
                self._threads[host.label] = thread
                thread.start()

    def fit(self) -> frozenset[str]:
        """Return the labels of those that have passed the preflight since they were lost."""
        while not self._passed.empty():
            self._fit.add(self._passed.get())
        return frozenset(self._fit)

    def verified(self, result: Result) -> Result:
        """Return a result that says which of the hosts lost before are clean by now."""
        self._is_over.set()
        each(self._is_clean, list(self._agents), seconds=CLEANUP_SECONDS)
        return replace(result, hosts={**result.hosts, **dict.fromkeys(self._clean, "clean")})

    def _check_until_fit(self, host: Host) -> None:
        while not (self._is_clean(host.label) and self._is_fit(host)):
            if self._is_over.wait(CHECK_SECONDS):
                return
        self._passed.put(host.label)

    def _is_clean(self, label: str) -> bool:
        """Return whether nothing is left on a host of what was lost there; end what is."""
        agent = self._agents.get(label)
        if agent is None or label in self._clean:
            return True
        swept = agent.sweep()
        if swept.reason or swept.survivors:
            return False
        self._clean.add(label)
        return True

    def _is_fit(self, host: Host) -> bool:
        spec = self._spec
        transport = spec.transports[spec.hosts.index(host)]
        options = replace(spec.options, wait=False)
        alone = replace(spec, options=options, hosts=[host], transports=[transport], turn="")
        alone = replace(alone, probed=NO_FACTS)
        try:
            with preflight(alone, warn=lambda line: None, is_restart=True):
                return True
        except Problem:
            return False
