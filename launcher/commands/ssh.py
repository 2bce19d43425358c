"""`./run-ssh`: the command line of a launch on hosts, and the same from Python.

What --help does without is imported once the words are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rackrun.launcher.commands.parse import from_names, read
from rackrun.launcher.commands.settings import CHECK_HEAD, SSH_HEAD, SshOptions
from rackrun.launcher.commands.work import work_of
from rackrun.launcher.settings_file import SettingsFile

if TYPE_CHECKING:
    from rackrun.launcher.run.result import Result

OPTIONS = SshOptions


def main(args: Sequence[str], again: SettingsFile | None = None) -> int:
    """Run the command line, or a run `again`; return the exit code."""
    line = read("ssh", SshOptions, CHECK_HEAD if "--check" in args else SSH_HEAD, args, again)
    if line.options.sweep:
        from rackrun.launcher.commands.reach import listed
        from rackrun.launcher.search.sweep import groups_of, sweep

        groups = groups_of(listed(line.options), line.options.sweep_hosts)
        return sweep("ssh", line.words, line.work, line.options, groups)
    from rackrun.launcher.commands.ssh_run import start

    with line.naming_the_file():
        return start(line)


def launch(args: Sequence[str], options: Mapping[str, object]) -> Result:
    """Launch from Python: the arguments after the host file, and the options by name."""
    hosts = options.get("hosts")
    if isinstance(hosts, list | tuple):
        names = {name: value for name, value in options.items() if name != "hosts"}
        options = {**names, "host_list": ",".join(map(str, hosts))}
    settings = from_names(SshOptions, options)
    from rackrun.launcher.commands.ssh_run import run

    return run(work_of(args), settings)
