"""`./run-ssh`: torchrun on every host of a host file, after checks on all of them.

Other modules are imported after parsing the command line, so that `--help` answers at once.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from rackrun.commandline.parser import current_names
from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.launcher.commands.parse import (
    RENAMED,
    from_names,
    parse,
    read_work,
    split,
    takes_settings_file,
    typed,
    work_of,
)
from rackrun.launcher.commands.settings import CHECK_HEAD, SSH_HEAD, SshOptions
from rackrun.launcher.run.job import Command
from rackrun.launcher.run.result import Result
from rackrun.launcher.settings_file import NO_FILE
from rackrun.user_code.tasks import find_task

OPTIONS = SshOptions


@takes_settings_file(SshOptions, plain_words=1)
def main(args: Sequence[str]) -> int:
    """Run the command line, and return the exit code."""
    leading, plain = split(args, SshOptions)
    named = {arg.partition("=")[0] for arg in current_names(leading, RENAMED)}
    plain_words = 0 if NO_FILE & named else 1  # the host file
    if plain_words and plain and plain[0] != "--":
        _refuse_other_first_word(leading, plain)
    launcher_args, rest = split(args, SshOptions, plain_words)
    options = _parsed(launcher_args)
    work = read_work("ssh", SshOptions, launcher_args, rest)
    if options.sweep:
        from rackrun.launcher.commands.reach import listed
        from rackrun.launcher.search.sweep import groups_of, sweep

        return sweep(
            "ssh", launcher_args, work, options, groups_of(listed(options), options.sweep_hosts)
        )
    from rackrun.launcher.lifecycle.data_preparation import demo_for_hosts

    if work is None:
        # --check without a task asks hosts about no data.
        work = Command(()) if options.check else demo_for_hosts()
    from rackrun.launcher.commands.ssh_run import start

    return start(work, options, typed("ssh", launcher_args, work))


def _parsed(args: Sequence[str]) -> SshOptions:
    # with --check, help and errors are those of `rackrun check`
    name, head = ("check", CHECK_HEAD) if "--check" in args else ("ssh", SSH_HEAD)
    return parse(SshOptions, name, args, head)


def _refuse_other_first_word(leading: Sequence[str], args: Sequence[str]) -> None:
    first = args[0]
    is_task = (first.endswith(".py") or not Path(first).is_file()) and bool(find_task(first))
    is_script = first.endswith((".py", ".sh"))
    if not is_task and not is_script and (Path(first).exists() or not shutil.which(first)):
        return
    _parsed(leading)  # refuses the option --hostfile
    program = ["--", *(["python"] if first.endswith(".py") else [])]
    meant = shlex.join([*leading, "hosts.txt", *([] if is_task else program), *args])
    raise UsageError(
        f"{first} is a {'task' if is_task else 'program'}; the host file comes first:"
        f" {called('ssh')} {meant}"
    )


def launch(args: Sequence[str], options: Mapping[str, object]) -> Result:
    """Launch from Python: the arguments after the host file, and the options by name."""
    settings = from_names(SshOptions, options)
    from rackrun.launcher.commands.ssh_run import launch_attached
    from rackrun.launcher.lifecycle.data_preparation import demo_for_hosts

    return launch_attached(work_of(args) or demo_for_hosts(), settings)
