"""The members of a sweep: a name and a command line for each combination of settings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from launcher.run.hosts import Host
from launcher.run.job import Command, TaskWork, Work, without_option
from rackrun.errors import UsageError
from rackrun.light_dataclass import dataclass
from rackrun.run_folder import file_name
from rackrun.units import plural

OPTION = "--sweep"
OF_THE_SWEEP = (OPTION, "--sweep-hosts", "--name", "--include", "--exclude")
MOST_MEMBERS = 1000
NAME_LENGTH = 120


@dataclass(frozen=True)
class Combination:
    """A combination of settings, and the name of its run."""

    name: str
    settings: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.settings)

    def work(self, work: Work) -> Work:
        """Return what the sweep is about with these settings."""
        options = [f"--{key}={value}" for key, value in self.settings]
        if isinstance(work, Command):
            return replace(work, args=(*work.args, *options))
        kept = tuple(work.options)
        for key, _ in self.settings:
            kept = without_option(kept, f"--{key}")
        return replace(work, options=(*kept, *options))


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
    items = [value.strip() for value in values.split(",")]
    if not equals or not key.strip("-") or not all(items):
        raise UsageError(f"{OPTION} {text}: type an option and its values: {OPTION} lr=0.1,0.3")
    return key.strip("-").replace("_", "-"), list(dict.fromkeys(items))


def groups_of(hosts: Sequence[Host], size: int) -> list[str]:
    """Return the hosts in groups of this size, as --include names them; 0: all in one group."""
    size = size or len(hosts)
    if not 0 < size <= len(hosts):
        raise UsageError(f"--sweep-hosts {size}: there are {plural(len(hosts), 'host')}")
    names = [_included(host) for host in hosts]
    starts = range(0, len(names) - size + 1, size)  # hosts that fill no group are left out
    return [",".join(names[first : first + size]) for first in starts]


def _included(host: Host) -> str:
    return host.name + (f":{','.join(map(str, host.devices))}" if host.devices else "")


def command(launcher_args: Sequence[str], member: Combination, group: str, work: Work) -> list[str]:
    """Return the arguments of a member's launch on a group of hosts, from those of the sweep."""
    kept = tuple(arg for arg in launcher_args if arg != "--plain")
    for option in OF_THE_SWEEP:
        kept = without_option(kept, option)
    hosts = [f"--include={group}"] if group else []
    what = member.work(work)
    work_args = [what.task, *what.options] if isinstance(what, TaskWork) else ["--", *what.args]
    return ["--plain", f"--name={member.name}", *hosts, *kept, *work_args]
