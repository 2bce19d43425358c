"""`--sweep lr=0.1,0.3`: a run for each combination of settings, side by side on groups of hosts.

    members -> a launch each, in a process of its own -> run folders -> table, compare.html

A launch that fails ends no other. Each is a run as any other: `ps` shows it, `stop` ends it.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rackrun.commands import called, program
from rackrun.errors import Problem, UsageError
from rackrun.launcher.catalog.listed_runs import runs_in
from rackrun.launcher.lifecycle.task_check import check_task_options
from rackrun.launcher.output.console import say, short_path
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.run.job import Command, TaskWork, Work, without_option
from rackrun.launcher.run.settings import SweepOptions
from rackrun.run_folder import file_name, new_run_folder
from rackrun.run_report.folder import Story, read
from rackrun.run_report.page import write_comparison
from rackrun.signals import has_ended
from rackrun.tables import table
from rackrun.units import plural, share

OPTION = "--sweep"
OF_THE_SWEEP = (OPTION, "--sweep-hosts", "--name", "--include", "--exclude")
"""Options that its members do not get from the sweep: none, or values of their own."""
MOST_MEMBERS = 1000
NAME_LENGTH = 120
LOOK_SECONDS = 0.2
ALONE = ("detach", "check", "json")
"""Options that do something else than to launch once."""


def sweep(
    command_name: str,
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

    _refuse_invalid(command_name, members, work)
    if options.dry_run:
        for member in members:
            sys.stdout.write(f"{called(command_name)} {shlex.join(launch(member, groups[0]))}\n")
        return 0
    folder = new_run_folder(options.runs, f"{base}-sweep", options.share).path
    launches = Launches(folder, members, [*program(), command_name], launch)
    try:
        launches.run(groups)
    finally:
        show(members, options.runs, folder)
    return next((code for code in launches.codes.values() if code), 0)


def _refuse_invalid(command_name: str, members: Sequence[Combination], work: Work) -> None:
    # Not every combination is checked, but each value is, in one of them.
    checked: set[tuple[str, str]] = set()
    for member in members:
        if not checked.issuperset(member.settings):
            checked.update(member.settings)
            with check_task_options(member.work(work), command_name) as refuse:
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
        folder = short_path(self.folder)
        say(f"{plural(len(to_come), 'run')}, {len(groups)} at a time; output in {folder}")
        try:
            while to_come or running:
                while to_come and free:
                    member, group = to_come.pop(0), free.pop(0)
                    running[member.name] = self._started(member, group), group
                time.sleep(LOOK_SECONDS)
                for name, (process, group) in list(running.items()):
                    if has_ended(process):
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
        code = self.codes[name] = process.wait()
        end = f"exit code {code}" if code else "done"
        member = next(member for member in self.members if member.name == name)
        say(f"{member}: {end}")

    def _stop(self, running: dict[str, subprocess.Popen[bytes]]) -> None:
        say(f"stopping {plural(len(running), 'run')}, Ctrl-C again to force")
        while left := [process for process in running.values() if not has_ended(process)]:
            for process in left:
                os.kill(process.pid, signal.SIGINT)
            try:
                for process in left:
                    process.wait()
            except KeyboardInterrupt:  # passed on as well: a second one forces
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
    stories: dict[str, Story] = {}
    for name, path in folders.items():
        try:
            stories[name] = read(path)
        except Problem as error:
            say(str(error))
    rows = [
        (*(value for _, value in member.settings), *cells(stories.get(member.name)))
        for member in members
    ]
    head = [key for key, _ in members[0].settings]
    sys.stdout.write(table([*head, "verdict", "accuracy", "loss", "images/s", "run"], rows))
    drawn = [folders[member.name] for member in members if member.name in stories]
    if len(drawn) > 1:
        page = write_comparison(drawn, folder / "compare.html")
        sys.stdout.write(f"comparison: {short_path(page)}\n")
    sys.stdout.flush()


def cells(story: Story | None) -> Iterator[str]:
    """Yield the cells of a member's row; of several evaluations, the best accuracy.

    A script without metrics.jsonl has the numbers that it reported last.
    """
    if story is None:
        yield from ("not started", "", "", "", "")
        return
    yield story.end.verdict or "not ended"
    evaluation = story.validation
    yield "" if story.accuracy is None else share(story.accuracy, 2)
    yield _shown(evaluation[-1]["loss"] if evaluation else story.end.number("loss"), ".4f")
    yield _shown(story.speed, ",.0f")
    yield story.name


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


# -- the members of a sweep


@dataclass(frozen=True)
class Combination:
    """A combination of settings, and the name of its run."""

    name: str
    settings: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.settings)

    def work(self, work: Work) -> Work:
        """Return what the sweep is about with these settings."""
        if isinstance(work, Command):  # which may have options with underscores
            options = [f"--{key}={value}" for key, value in self.settings]
            return replace(work, args=(*work.args, *options))
        kept = tuple(work.options)
        for key, value in self.settings:
            option = f"--{key.replace('_', '-')}"
            kept = (*without_option(kept, option), f"{option}={value}")
        return replace(work, options=kept)


def members_of(texts: Sequence[str], name: str) -> list[Combination]:
    """Return every combination of the values in `lr=0.1,0.3`; UsageError for what is none."""
    axes = dict(_axis(text) for text in texts)
    if len(axes) < len(texts):
        raise UsageError(f"{OPTION}: name each option once, with all of its values")
    combinations = list(itertools.islice(itertools.product(*axes.values()), MOST_MEMBERS + 1))
    if len(combinations) > MOST_MEMBERS:
        raise UsageError(f"{OPTION}: more than {MOST_MEMBERS:,} combinations")
    members = []
    for number, values in enumerate(combinations, start=1):
        settings = tuple(zip(axes, values, strict=True))
        label = "-".join(f"{key}-{value}" for key, value in settings)
        members.append(Combination(file_name(f"{name}-{number}-{label}")[:NAME_LENGTH], settings))
    return members


def _axis(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    items = [value.strip() for value in re.split(r",(?![^\[]*\])", values)]  # [1,2],[3]: two
    if not equals or not key.strip("-") or not all(items):
        raise UsageError(f"{OPTION} {text}: type an option and its values: {OPTION} lr=0.1,0.3")
    return key.strip("-"), list(dict.fromkeys(items))


def groups_of(hosts: Sequence[Host], size: int) -> list[str]:
    """Return the hosts in groups of this size, as --include names them; 0: all in one group."""
    size = size or len(hosts)
    if not 0 < size <= len(hosts):
        raise UsageError(f"--sweep-hosts {size}: there are {plural(len(hosts), 'host')}")
    names = [
        host.name + (f":{','.join(map(str, host.devices))}" if host.devices else "")
        for host in hosts
    ]
    starts = range(0, len(names) - size + 1, size)  # hosts that fill no group are left out
    return [",".join(names[first : first + size]) for first in starts]


def command(launcher_args: Sequence[str], member: Combination, group: str, work: Work) -> list[str]:
    """Return the arguments of a member's launch on a group of hosts, from those of the sweep."""
    shared_args = tuple(arg for arg in launcher_args if arg != "--plain")
    for option in OF_THE_SWEEP:
        shared_args = without_option(shared_args, option)
    hosts = [f"--include={group}"] if group else []
    work = member.work(work)
    work_args = [work.task, *work.options] if isinstance(work, TaskWork) else ["--", *work.args]
    return ["--plain", f"--name={member.name}", *hosts, *shared_args, *work_args]
