"""One attempt of a run: what runs where, and the results that come back from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rackrun.errors import Problem
from rackrun.launcher.files.download import fetch_results, fetch_returned
from rackrun.launcher.run.job import FunctionCall, Job
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.result import Result
from rackrun.launcher.transport.base import Transport
from rackrun.launcher.transport.rpc import RpcClient
from rackrun.signals import ended_by_a_signal


@dataclass
class Attempt:
    """One run on hosts that are fit for it."""

    job: Job
    plan: Plan
    """The plan for the hosts that take part."""
    probes: Sequence[RpcClient | None]
    """The probes on the plan's hosts, in its order, which become the agents."""
    transports: Sequence[Transport]
    """The transports to the same hosts, then those to spares."""
    versions: str
    """The versions of torch and driver on the hosts."""
    is_here: bool
    """The only host is this machine, which has the run folder."""

    @property
    def of_plan(self) -> Sequence[Transport]:
        """The transports to the plan's hosts."""
        return self.transports[: len(self.plan.hosts)]

    @property
    def left_behind(self) -> str:
        """Where the results are that were not fetched."""
        first = self.plan.hosts[0]
        return f"the results are still on {first.name}, in {first.folder}"

    def fetch_results(self, result: Result, say: Callable[[str], object]) -> str:
        """Fetch what the first rank's host has in its run folder; return that, or why nothing.

        A signal raises KeyboardInterrupt.
        """
        if self.is_here:
            return ""
        pairs = list(zip(self.of_plan, self.plan.hosts, strict=True))
        transport, first = pairs[0]
        if result.hosts[first.name] != "clean":
            return self.left_behind
        job, run_id = self.job, self.plan.run_id
        try:
            with ended_by_a_signal():
                fetched = fetch_results(transport, first, run_id, job.folder.path, say=say)
                if isinstance(job.work, FunctionCall):  # what it returned on each rank
                    for transport, host in pairs:
                        if result.hosts[host.name] == "clean":
                            fetch_returned(transport, host, run_id, job.folder.returned)
                return str(fetched)
        except (Problem, OSError) as error:
            return f"{self.left_behind}: {str(error).removeprefix(f'{first.name}: ')}"
