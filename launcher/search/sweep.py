"""`--sweep lr=0.1,0.3`: a run for each combination of settings, side by side on groups of hosts.

    members -> a launch each, in a process of its own -> run folders -> table, compare.html

A launch that fails ends no other. Each is a run as any other: `ps` shows it, `stop` ends it.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import field
from pathlib import Path

from launcher.catalog.folders import runs_in
from launcher.lifecycle.task_check import check_task_options
from launcher.output.console import say
from launcher.run.job import Work
from launcher.run.settings import SweepOptions
from launcher.search.members import OPTION, Combination, command, members_of
from rackrun.commands import called, program
from rackrun.errors import Problem, UsageError
from rackrun.light_dataclass import dataclass
from rackrun.run_folder import new_run_folder
from rackrun.run_report.folder import Story, read
from rackrun.run_report.page import write_comparison
from rackrun.tables import table
from rackrun.units import plural

LOOK_SECONDS = 0.2
CHECKS_AT_ONCE = 4  # processes, of a quarter of a second each
ALONE = ("scaling", "detach", "check", "json")
"""Options that do something else than to launch once."""


def sweep(
    way: str,
    launcher_args: Sequence[str],
    work: Work | None,
    options: SweepOptions,
    groups: Sequence[str],
) -> int:
    """Launch every member, on one group of hosts each; return the first exit code but 0."""
    for name in ALONE:
        if getattr(options, name, False):
            raise UsageError(f"{OPTION} and --{name} exclude each other: leave one of them out")
    if work is None:
        raise UsageError(f"{OPTION} needs a task or a command; type for example: catdog --data ...")
    base = options.name or work.name
    members = members_of(options.sweep, base)

    def launch(member: Combination, group: str) -> list[str]:
        return command(launcher_args, member, group, work)

    _refuse_invalid(way, members, work)
    if options.dry_run:
        for member in members:
            sys.stdout.write(f"{called(way)} {shlex.join(launch(member, groups[0]))}\n")
        return 0
    folder = new_run_folder(options.runs, f"{base}-sweep", options.share).path
    launches = Launches(folder, members, [*program(), way], launch)
    try:
        launches.run(groups)
    finally:
        show(members, options.runs, folder)
    return next((code for code in launches.codes.values() if code), 0)


def _refuse_invalid(way: str, members: Sequence[Combination], work: Work) -> None:
    """Raise UsageError for a value that the task refuses; each is in one member that is checked."""
    checked: set[tuple[str, str]] = set()
    with ExitStack() as stack:
        refusals: list[Callable[[], object]] = []
        for member in members:
            if checked.issuperset(member.settings):
                continue
            checked.update(member.settings)
            if len(refusals) == CHECKS_AT_ONCE:
                refusals.pop(0)()
            refusals.append(stack.enter_context(check_task_options(member.work(work), way)))
        for refuse in refusals:
            refuse()


@dataclass
class Launches:
    """The launches of a sweep: pending, running, and how the others ended."""

    folder: Path
    members: Sequence[Combination]
    program: Sequence[str]
    """How a launch begins; `command` has the rest."""
    command: Callable[[Combination, str], list[str]]
    codes: dict[str, int] = field(default_factory=dict)
    """Exit codes by the names of members."""

    def run(self, groups: Sequence[str]) -> None:
        """Launch each member on the next group that is free; a signal ends all that run."""
        to_come, free = list(self.members), list(groups)
        running: dict[str, tuple[subprocess.Popen[bytes], str]] = {}
        say(f"{plural(len(to_come), 'run')}, {len(groups)} at a time; output in {self.folder}")
        try:
            while to_come or running:
                while to_come and free:
                    member, group = to_come.pop(0), free.pop(0)
                    running[member.name] = self._started(member, group), group
                time.sleep(LOOK_SECONDS)
                for name, (process, group) in list(running.items()):
                    if process.poll() is not None:
                        del running[name]
                        free.append(group)
                        self._note_end(name, process)
        except KeyboardInterrupt:
            self._stop({name: process for name, (process, _) in running.items()})
            raise

    def _started(self, member: Combination, group: str) -> subprocess.Popen[bytes]:
        say(f"{member}: starts{f' on {group}' if group else ''}")
        with (self.folder / f"{member.name}.log").open("wb") as log:
            return subprocess.Popen(
                [*self.program, *self.command(member, group)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C reaches it once, from here
            )

    def _note_end(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.codes[name] = process.returncode
        end = f"exit code {process.returncode}" if process.returncode else "done"
        member = next(member for member in self.members if member.name == name)
        say(f"{member}: {end}")

    def _stop(self, running: dict[str, subprocess.Popen[bytes]]) -> None:
        """Pass Ctrl-C on to all launches, and each further one, until they have ended."""
        say(f"stopping {plural(len(running), 'run')}, Ctrl-C again to force")
        while any(process.poll() is None for process in running.values()):
            for process in running.values():
                process.send_signal(signal.SIGINT)
            try:
                for process in running.values():
                    process.wait()
            except KeyboardInterrupt:
                continue
        for name, process in running.items():
            self._note_end(name, process)


def show(members: Sequence[Combination], runs: Path, folder: Path) -> None:
    """Print the result of each run, and draw a page that compares them."""
    begun = folder.name
    folders: dict[str, Path] = {}
    for run in runs_in(runs):  # the newest first
        if Path(run.folder).name >= begun[:15]:
            folders.setdefault(run.name, Path(run.folder))
    stories = {name: story for name, path in folders.items() if (story := _story(path))}
    rows = [
        (*(value for _, value in member.settings), *cells(stories.get(member.name)))
        for member in members
    ]
    head = [key for key, _ in members[0].settings]
    sys.stdout.write(table([*head, "verdict", "accuracy", "loss", "images/s", "run"], rows))
    drawn = [folders[member.name] for member in members if member.name in stories]
    if len(drawn) > 1:
        sys.stdout.write(f"comparison: {write_comparison(drawn, folder / 'compare.html')}\n")
    sys.stdout.flush()


def _story(folder: Path) -> Story | None:
    try:
        return read(folder)
    except Problem as error:
        say(str(error))
        return None


def cells(story: Story | None) -> Iterator[str]:
    """Yield the cells of a member's row; of several evaluations, the best accuracy.

    A script without metrics.jsonl has the numbers that it reported last.
    """
    if story is None:
        yield from ("not started", "", "", "", "")
        return
    yield story.end.verdict or "not ended"
    evaluation = story.validation
    yield _shown(story.accuracy, ".2%")
    yield _shown(evaluation[-1]["loss"] if evaluation else story.end.number("loss"), ".4f")
    yield _shown(story.speed, ",.0f")
    yield story.name


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
