"""`./run-ssh`: torchrun on every host of a host file, after a look at all of them.

What does the work is imported behind the command line, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.commands.parse import from_names, is_question, parse, split, typed, work_of
from launcher.commands.ssh_settings import SshOptions
from launcher.run.job import TaskWork
from launcher.scaling.sweep import hoisted
from rackrun.contract import TASKS
from rackrun.errors import UsageError

if TYPE_CHECKING:
    from launcher.run.result import Result

DEFAULT = TaskWork("catdog", ("--data", "data/shards"))
LATER = ("attach", "status", "logs", "stop")
"""What can be said of a detached run, in place of a host file."""


def main(args: Sequence[str]) -> int:
    """Run what the command line says, and return the exit code."""
    if args and args[0] in LATER:
        from launcher.commands.detached import main as look_after

        return look_after(args[0], args[1:])
    leading, plain = split(args, SshOptions)
    words = 0 if "--slurm" in leading else 1  # the host file
    if words and plain and plain[0] in TASKS and not Path(plain[0]).is_file():
        hint = f"the host file comes first: ./run-ssh hosts.txt {plain[0]}"
        raise UsageError(f"{plain[0]} is a task; {hint}")
    own, rest = hoisted(*split(args, SshOptions, words))
    if own and own == plain[:1]:  # only the host file: saves the tenth of a second to parse it
        options = SshOptions(hosts=Path(own[0]))
    else:
        options = parse(SshOptions, "ssh", own, description())
    work = work_of(rest) or DEFAULT
    if is_question(work):
        sys.stdout.flush()
        os.execv(sys.executable, work.argv(sys.executable))
    from launcher.commands.ssh_run import start

    return start(work, options, typed("ssh", own, work))


def launch(words: Sequence[str], options: Mapping[str, object]) -> Result:
    """The same for a program: the words after the host file, and the options by name."""
    settings = from_names(SshOptions, options)
    from launcher.commands.ssh_run import stay

    return stay(work_of(words) or DEFAULT, settings)


def description() -> str:
    """Return the head of the help."""
    return (
        "{prog} [options] HOSTS [TASK [task options] | -- COMMAND]: torchrun on every host of a"
        " file, after a look at all of them.\n"
        f"{{prog}} {'|'.join(LATER)} RUN: look after a run that was started with --detach.\n"
        "{prog} ps [HOSTS]: list the runs.\n"
        f"Tasks: {', '.join(TASKS)}; {{prog}} HOSTS TASK --help shows the options of a task.\n"
        "Without a task: trains catdog on data/shards."
    )
