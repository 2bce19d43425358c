"""`./run-ssh`: torchrun on every host of a host file, after checks on all of them.

Other modules are imported after parsing the command line, so that `--help` answers at once.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.commands.parse import (
    RENAMED,
    from_names,
    hoisted,
    parse,
    read_work,
    split,
    takes_settings_file,
    typed,
    work_of,
)
from launcher.commands.settings import CHECK_HEAD, SSH_HEAD, SshOptions
from launcher.config.command_line import NO_FILE
from launcher.lifecycle.task_check import demo_for_hosts
from launcher.run.job import Command
from rackrun import commandline
from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.user_code.tasks import find_task

if TYPE_CHECKING:
    from launcher.run.result import Result

ONLY_HOSTS = Command(())
"""The work of --check without a task: hosts are asked for no data."""

CHECK = "--check"

LATER = ("attach", "status", "logs", "stop")
"""Commands on a detached run, typed instead of a host file."""


@takes_settings_file(SshOptions, words=1)
def main(args: Sequence[str]) -> int:
    """Run the command line, and return the exit code."""
    if args and args[0] in LATER:
        from launcher.commands.detached import main as look_after

        return look_after(args[0], args[1:])
    leading, plain = split(args, SshOptions)
    named = {word.partition("=")[0] for word in commandline.current_names(leading, RENAMED)}
    words = 0 if NO_FILE & named else 1  # the host file
    if words and plain and plain[0] != "--":
        _refuse_other_first_word(leading, plain)
    own, rest = hoisted(*split(args, SshOptions, words))
    is_plain = own and own == plain[:1]  # only the host file: parsing takes a tenth of a second
    options = SshOptions(hosts=Path(own[0])) if is_plain else _parsed(own)
    work = read_work("ssh", SshOptions, own, rest)
    if options.sweep:
        from launcher.commands.reach import listed
        from launcher.search.members import groups_of
        from launcher.search.sweep import sweep

        return sweep("ssh", own, work, options, groups_of(listed(options), options.sweep_hosts))
    if work is None:
        work = ONLY_HOSTS if options.check else demo_for_hosts()
    from launcher.commands.ssh_run import start

    return start(work, options, typed("ssh", own, work))


def _parsed(words: Sequence[str]) -> SshOptions:
    """Return the options; with --check, help and errors are those of `rackrun check`."""
    name, head = ("check", CHECK_HEAD) if CHECK in words else ("ssh", SSH_HEAD)
    return parse(SshOptions, name, words, head)


def _refuse_other_first_word(leading: Sequence[str], words: Sequence[str]) -> None:
    """Raise UsageError for a task or a program in place of the host file."""
    word = words[0]
    is_task = (word.endswith(".py") or not Path(word).is_file()) and bool(find_task(word))
    is_script = word.endswith((".py", ".sh"))
    if not is_task and not is_script and (Path(word).exists() or not shutil.which(word)):
        return
    _parsed(leading)  # refuses the option --hostfile
    program = ["--", *(["python"] if word.endswith(".py") else [])]
    meant = shlex.join([*leading, "hosts.txt", *([] if is_task else program), *words])
    raise UsageError(
        f"{word} is a {'task' if is_task else 'program'}; the host file comes first:"
        f" {called('ssh')} {meant}"
    )


def launch(words: Sequence[str], options: Mapping[str, object]) -> Result:
    """Launch from Python: the words after the host file, and the options by name."""
    settings = from_names(SshOptions, options)
    from launcher.commands.ssh_run import stay

    return stay(work_of(words) or demo_for_hosts(), settings)
