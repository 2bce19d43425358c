"""`rerun RUN`: start a run of this machine again, from the settings file in its folder."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.config.settings_file import read_settings
from launcher.detached.known_runs import known_runs
from launcher.run.job import RunFolder
from rackrun.commands import COMMANDS, called
from rackrun.errors import UsageError
from rackrun.run_report.called import RUNS, run_called

ABOUT = """\
usage: {prog} RUN [options] [TASK [task options]]

Start a run again as a new one, with the settings in its folder. RUN is its folder, its name, or
the start of its id. Options that are typed win over those of the run.
"""


def main(args: Sequence[str]) -> int:
    """Start the run again; return its exit code."""
    if args and args[0] in ("-h", "--help"):
        sys.stdout.write(ABOUT.replace("{prog}", called("rerun")))
        return 0
    way, *words = command_line(args)
    return COMMANDS[way].load()(words) or 0


def command_line(args: Sequence[str]) -> list[str]:
    """Return the words that start the run again: the way to launch, then its options."""
    if not args or args[0].startswith("-"):
        raise UsageError(f"rerun of which run? type for example: {called('rerun')} runs/latest")
    settings = RunFolder(folder_of(args[0])).settings
    if not settings.is_file():
        raise UsageError(f"{settings.parent} has no {settings.name}: it cannot be started again")
    _check_written_here(RunFolder(settings.parent))
    file = read_settings(settings)
    if not file.launch:
        raise UsageError(f"{settings}: launch: missing; type: --config {settings}")
    return [file.launch, "--config", str(settings), *args[1:]]


def _check_written_here(folder: RunFolder) -> None:
    """Raise UsageError for settings that may be a host's: `rerun` would run its commands here.

    The launcher's own are closed to others. In a copy of a detached run they are those that were
    written down when it was started from this machine.
    """
    found = folder.settings.lstat()
    is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    is_ours = is_ours and not found.st_mode & 0o077
    if is_ours and os.path.lexists(folder.attached):
        known = known_runs().get(folder.attached.read_text(errors="replace"))
        is_ours = known is not None and folder.settings.read_bytes() == known.settings.encode()
    if not is_ours:
        what = "not written by the launcher on this machine"
        raise UsageError(
            f"{folder.settings}: {what}; read it, then type: --config {folder.settings}"
        )


def folder_of(run: str) -> Path:
    """Return the folder of a run that is called by its folder, its name or the start of its id."""
    folder = run_called(run)
    if not folder.is_dir():
        raise UsageError(f"no run {run} in {RUNS}; {called('ps')} lists all")
    return folder
