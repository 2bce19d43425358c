"""The run folder of an attempt on its first host, and the copy of it on this machine.

No host can have the working tree changed. A copy is a new folder right below the folder for
results, and carries the id of its run; whatever has that name already is left alone, unless it is a
copy of the same run, or the very folder, on a shared disk. Its settings file comes from this
machine, which started the run, and not from the host.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rackrun.atomic import write_whole
from rackrun.contract.files import ATTACHED
from rackrun.errors import Problem
from rackrun.launcher.detached.entries import AttemptRecord
from rackrun.launcher.detached.locate import ReachedRun, run_manager_on
from rackrun.launcher.detached.replies import YesOrNo
from rackrun.launcher.files.download import fetch_results
from rackrun.launcher.output.console import say
from rackrun.launcher.output.log_files import write_run_page
from rackrun.run_folder import RunFolder
from rackrun.runs import recorded_runs
from rackrun.terminal import one_line


def bring_here(run: ReachedRun, runs: Path, attempt: AttemptRecord) -> Path:
    """Copy the run folder of an attempt here, but for checkpoints; return the folder's path."""
    source = Path(attempt.folder)
    target = runs.resolve() / source.name
    try:
        is_copy = _is_copy_of(run.id, target)
        with _alone_in(target):
            if is_copy:
                first = attempt.plan.hosts[0]
                fetched = fetch_results(run.transport, first, "", target, (), say)
                if fetched.problems:
                    say(str(fetched))
                complete(run.id, RunFolder(target), attempt.plan.task)
            elif not is_same(run, source, target):
                raise Problem(f"{target} is there already, and is not of this run")
    except (Problem, OSError) as error:
        where = f"{run.host.label}, in {one_line(str(source))}"
        say(f"the results are still on {where}: {one_line(str(error))}")
        return source
    return target


def complete(run: str, folder: RunFolder, task: str) -> None:
    """Add what comes from this machine: the settings, where they are known, and the report."""
    record = recorded_runs().get(run)
    if record and record.settings:
        write_whole(folder.settings, record.settings.encode(), mode=0o600)
    if problem := write_run_page(folder.path, task):
        say(problem)


def _is_copy_of(run: str, target: Path) -> bool:
    if not os.path.lexists(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=ATTACHED, dir=target.parent))
        RunFolder(made).attached.write_text(run)
        try:
            made.rename(target)  # with its mark, for those who attach in the same moment
        except OSError:  # another one has made it first
            shutil.rmtree(made)
    mark = RunFolder(target).attached
    is_ours = not target.is_symlink() and not mark.is_symlink() and mark.is_file()
    return is_ours and mark.read_text() == run


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a disk that cannot lock folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_same(run: ReachedRun, source: Path, target: Path) -> bool:
    """Return True when the host sees a file that is put into this folder here.

    Paths and device numbers of two machines do not tell whether they share a disk.
    """
    mark = target / f".seen-{os.getpid()}-{time.time_ns()}"
    mark.touch()
    try:
        with run_manager_on(run.transport, run.host.python) as client:  # the other one is following
            path = str(source / mark.name)
            return client.parsed(client.call("exists", path=path), YesOrNo).yes
    finally:
        mark.unlink()
