"""`./run-ssh`: torchrun on every host of a host file, after checks on all of them.

Other modules are imported after parsing the command line, so that `--help` answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rackrun.launcher.commands.parse import from_names, read
from rackrun.launcher.commands.settings import CHECK_HEAD, SSH_HEAD, SshOptions
from rackrun.launcher.commands.work import work_of
from rackrun.launcher.run.job import Command
from rackrun.launcher.run.result import Result
from rackrun.launcher.settings_file import SettingsFile

OPTIONS = SshOptions


def main(args: Sequence[str], again: SettingsFile | None = None) -> int:
    """Run the command line, or a run `again`; return the exit code."""
    line = read("ssh", SshOptions, CHECK_HEAD if "--check" in args else SSH_HEAD, args, again)
    options, work = line.options, line.work
    if options.sweep:
        from rackrun.launcher.commands.reach import listed
        from rackrun.launcher.search.sweep import groups_of, sweep

        groups = groups_of(listed(options), options.sweep_hosts)
        return sweep("ssh", line.words, work, options, groups)
    from rackrun.launcher.lifecycle.data_preparation import demo_for_hosts

    if work is None:
        # --check without a task asks hosts about no data.
        work = Command(()) if options.check else demo_for_hosts()
    from rackrun.launcher.commands.ssh_run import start

    with line.naming_the_file():
        return start(work, options, line.again(work))


def launch(args: Sequence[str], options: Mapping[str, object]) -> Result:
    """Launch from Python: the arguments after the host file, and the options by name."""
    settings = from_names(SshOptions, options)
    from rackrun.launcher.commands.ssh_run import launch_attached
    from rackrun.launcher.lifecycle.data_preparation import demo_for_hosts

    return launch_attached(work_of(args) or demo_for_hosts(), settings)
