"""A launch before its first attempt: what is to run, under which options, and on which hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rackrun.atomic import write_whole
from rackrun.contract.task_needs import TaskNeeds
from rackrun.errors import Problem, SaveError, UsageError
from rackrun.launcher.lifecycle.restart_policy import RestartState
from rackrun.launcher.preflight.facts import NO_FACTS, ClusterFacts
from rackrun.launcher.preflight.requirements import Requirements
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.run.job import Job, run_name
from rackrun.launcher.transport.base import Transport
from rackrun.launcher.transport.parallel import all_or_raise
from rackrun.run_folder import RunFolder, folder_name, new_run_folder
from rackrun.user_code.revision import git_commit


@dataclass(frozen=True)
class LaunchSpec(Requirements):
    """All that a launch needs; its hosts, its task's needs and its code are filled in later."""

    settings: str = ""
    """The content of run.toml, by which it is started again."""
    hosts_file: str = ""
    """The content of hosts.json, by which its hosts are reached later."""
    hosts: Sequence[Host] = ()
    transports: Sequence[Transport | Problem] = ()
    """The ways to the hosts, in their order; for one that cannot be reached, the reason."""
    addresses: Sequence[str] = ()
    """The addresses at which this machine reaches hosts; "" for one behind a gateway."""
    probed: ClusterFacts = NO_FACTS
    """Facts whose probes hold the hosts, where there was a choice of hosts."""
    with_added_hosts: Callable[[LaunchSpec], tuple[LaunchSpec, Sequence[Host]]] | None = None
    """Called before a restart: reads the list of hosts again; None where a launch has chosen some.

    Returns the launch with the hosts that were added, reached and with its code, and the list.
    """

    @property
    def reached(self) -> list[Transport]:
        """Return the transports; raise Problem where a host cannot be reached."""
        return all_or_raise(self.transports)

    @property
    def restart_state(self) -> RestartState:
        """Return which hosts are active at first; raise UsageError for spares that do not fit."""
        options = self.options
        return RestartState(
            tuple(self.hosts), options.max_restarts, options.spares, options.min_hosts
        )

    def with_needs(self, needs: TaskNeeds) -> LaunchSpec:
        """Return the same launch of a task that needs this of the hosts.

        Raise UsageError if a restart on as few of them as --min-hosts says could not continue it.
        """
        least = self.options.min_hosts
        if needs.keeps_ranks and 0 < least < len(self.restart_state.active()):
            raise UsageError(
                f"--min-hosts {least}: each rank adds --batch-size images to a step, so fewer ranks"
                " cannot continue the run; type --exact-epochs behind the task, or leave it out"
            )
        return replace(self, needs=needs)

    @property
    def planned_folder(self) -> RunFolder:
        """Return a run folder that is not made, for a plan that is only shown."""
        return RunFolder(
            (self.options.runs / folder_name(run_name(self.options, self.work))).resolve()
        )

    def new_folder(self) -> RunFolder:
        """Make the run folder, with what starts the run again and what reaches its hosts."""
        folder = new_run_folder(
            self.options.runs, run_name(self.options, self.work), self.options.share
        )
        try:
            self.write_into(folder)
        except SaveError as error:
            raise SaveError(f"{error}; or type: --runs FOLDER") from error
        return folder

    def write_into(self, folder: RunFolder) -> None:
        """Write what starts the run again, and what reaches its hosts, into its folder."""
        for path, text in ((folder.settings, self.settings), (folder.hosts, self.hosts_file)):
            if text:
                write_whole(path, text.encode(), 0o600)  # it has values of --env

    def job(self, folder: RunFolder) -> Job:
        """Return the job of the first attempt."""
        commit, options = git_commit(Path.cwd()), self.options
        return Job(self.work, folder, options, commit=commit)
