"""`./run-local`: torchrun on this machine, through the same agent as on any other host.

Other modules are imported after parsing the command line, so that `--help` answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rackrun.commandline.help_page import Head
from rackrun.errors import UsageError
from rackrun.launcher.commands.parse import (
    from_names,
    parse,
    read_work,
    split,
    takes_settings_file,
    typed,
    work_of,
)
from rackrun.launcher.run.result import Result
from rackrun.launcher.run.settings import LocalOptions

HEAD = Head(
    "{prog} [options] [TASK [task options] | -- COMMAND]",
    "Train on this machine with torchrun. Without a task, draw cats and dogs and train on them.",
    (
        ("{prog}", "a demo that needs no data"),
        ("{prog} catdog --data data/shards", "a task"),
        ("{prog} --nproc 2 -- python train.py", "any script, on two ranks"),
        ("{prog} --dry-run catdog --data data/shards", "print what would run"),
        ("{prog} --sweep lr=0.1,0.3 catdog --data ...", "a run for each value"),
    ),
    "{prog} TASK --help shows the options of a task.",
)
"""The head of the help."""


OPTIONS = LocalOptions


@takes_settings_file(LocalOptions)
def main(args: Sequence[str]) -> int:
    """Run the command line, and return the exit code."""
    launcher_args, rest = split(args, LocalOptions)
    options = parse(LocalOptions, "local", launcher_args, HEAD)
    work = read_work("local", LocalOptions, launcher_args, rest)
    if options.sweep:
        from rackrun.launcher.search.sweep import sweep

        return sweep("local", launcher_args, work, options, [""])
    from rackrun.launcher.commands.local_run import start
    from rackrun.launcher.lifecycle.data_preparation import DEMO

    return start(work, options, typed("local", launcher_args, work or DEMO))


def launch(args: Sequence[str], options: Mapping[str, object]) -> Result:
    """Launch from Python: the arguments after the options, and the options by name."""
    work = work_of(args)
    if work is None:
        raise UsageError('nothing to run; for example: launch("catdog", "--epochs", "2")')
    settings = from_names(LocalOptions, options)
    from rackrun.launcher.commands.local_run import launch_local

    return launch_local(work, settings)
