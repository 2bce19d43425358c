"""Lost hosts of a run: each is checked until it passes the preflight again.

A host that is fit again takes part from the next restart on, or from the end of an epoch if the run
continues on fewer hosts than it began with.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from rackrun.errors import Problem
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec
from rackrun.launcher.lifecycle.planning import preflight
from rackrun.launcher.preflight.facts import NO_FACTS
from rackrun.launcher.run.hosts import Host

CHECK_SECONDS = 30.0  # between two checks of a host: each logs in there and starts a Python


class LostHosts(AbstractContextManager["LostHosts"]):
    """Checks lost hosts until its context ends, each in a thread of its own."""

    def __init__(self, spec: LaunchSpec) -> None:
        """Take all hosts of the run; none is checked yet."""
        options = replace(spec.options, wait=False)
        self._spec = replace(spec, options=options, turn="", probed=NO_FACTS)
        self._is_over = threading.Event()
        self._threads = dict[str, threading.Thread]()
        self._passed = queue.SimpleQueue[str]()
        self._fit = set[str]()

    def __exit__(self, *reason: object) -> None:
        self._is_over.set()

    def check(self, hosts: Sequence[Host]) -> None:
        """Check these hosts, which are the lost ones now."""
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

    def _check_until_fit(self, host: Host) -> None:
        while not self._is_fit(host):
            if self._is_over.wait(CHECK_SECONDS):
                return
        self._passed.put(host.label)

    def _is_fit(self, host: Host) -> bool:
        transport = self._spec.transports[self._spec.hosts.index(host)]
        alone = replace(self._spec, hosts=[host], transports=[transport])
        try:
            with preflight(alone, warn=lambda line: None, is_restart=True):
                return True
        except Problem:
            return False
