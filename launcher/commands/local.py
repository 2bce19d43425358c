"""`./run-local`: torchrun on this machine, through the same agent as on any other host.

Other modules are imported after parsing the command line, so that `--help` answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rackrun.commandline.help_page import Head
from rackrun.errors import UsageError
from rackrun.launcher.commands.parse import from_names, read
from rackrun.launcher.commands.work import work_of
from rackrun.launcher.run.result import Result
from rackrun.launcher.run.settings import LocalOptions
from rackrun.launcher.settings_file import SettingsFile

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


def main(args: Sequence[str], again: SettingsFile | None = None) -> int:
    """Run the command line, or a run `again`; return the exit code."""
    line = read("local", LocalOptions, HEAD, args, again)
    if line.options.sweep:
        from rackrun.launcher.search.sweep import sweep

        return sweep("local", line.words, line.work, line.options, [""])
    from rackrun.launcher.commands.local_run import start
    from rackrun.launcher.lifecycle.data_preparation import DEMO

    with line.naming_the_file():
        return start(line.work, line.options, line.again(line.work or DEMO))


def launch(args: Sequence[str], options: Mapping[str, object]) -> Result:
    """Launch from Python: the arguments after the options, and the options by name."""
    work = work_of(args)
    if work is None:
        raise UsageError('nothing to run; for example: launch("catdog", "--epochs", "2")')
    settings = from_names(LocalOptions, options)
    from rackrun.launcher.commands.local_run import launch_local
    from rackrun.launcher.output.screen import shown_here

    return launch_local(work, settings, shown_here(settings.plain))
