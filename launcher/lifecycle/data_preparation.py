"""The data that a launch makes before it starts: the demo, or shards of a folder of images."""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rackrun.atomic import translated_os_errors
from rackrun.commands import called
from rackrun.contract import variables
from rackrun.contract.files import MANIFEST_NAME
from rackrun.data_location import is_folder
from rackrun.errors import Problem, UsageError
from rackrun.launcher.output.console import say
from rackrun.launcher.run.job import TaskWork, Work, data_of, with_data
from rackrun.run_folder import file_name
from rackrun.shard_folder import holds_images
from rackrun.units import data_size

DEMO_FOLDER = "data/demo"
DEMO_SHARDS = f"{DEMO_FOLDER}/shards"
DEMO = TaskWork("catdog", ("--recipe", "demo", "--data", DEMO_SHARDS))
"""What a launch without a task trains."""

DIGITS = 12  # of the digest in a folder's name
OLDER_SHOWN = 3


class NotMade(Problem):
    """The data could not be made; the program that was to make them has said why."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("the data were not converted; see the lines above")
        self.exit_code = exit_code


def demo_for_hosts() -> TaskWork:
    """Return the demo for hosts, where the path of its data is that on this machine."""
    return TaskWork("catdog", ("--recipe", "demo", "--data", str(Path(DEMO_SHARDS).absolute())))


def with_shards(work: Work, runs: Path) -> Work:
    """Return the work with its shards in place of a folder of images, whether they are made or not.

    Each state of such a folder has shards of its own, in the user's cache folder; a folder that was
    moved keeps those that it had, or none of its runs could go on. Raise UsageError if the folder
    of runs is in it: the second launch would take that for a class.
    """
    data = data_of(work)
    if not data or not is_folder(data) or not holds_images(Path(data)):
        return work
    if runs.resolve().is_relative_to(Path(data).resolve()):
        raise UsageError(f"--data {data}: {runs} is in it, which is no class; type: --runs FOLDER")
    with translated_os_errors(Path(data)):
        digest = hashlib.sha256(b"".join(_states(Path(data)))).hexdigest()[:DIGITS]
    shards = cache_folder() / f"{file_name(Path(data).resolve().name)}-{digest}"
    if not (shards / MANIFEST_NAME).exists():
        made = [each.parent for each in cache_folder().glob(f"*-{digest}/{MANIFEST_NAME}")]
        shards = next(iter(made), shards)
    return with_data(work, str(shards))


def cache_folder() -> Path:
    """Return the folder of shards that launches have made of images."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "rackrun", "data")


def is_to_make(typed: Work, work: Work) -> bool:
    """Return whether a launch makes the data of a work first: the demo's, or shards of images."""
    makes = typed != work or work in (DEMO, demo_for_hosts())
    return makes and not (Path(data_of(work)) / MANIFEST_NAME).exists()


def say_what_is_made(typed: Work, work: Work) -> None:
    """Say what shards stand for a folder of images."""
    if typed == work:
        return
    images, shards = data_of(typed), Path(data_of(work))
    if not is_to_make(typed, work):
        say(f"{images}: images, converted before, to {shards}")
        return
    say(f"{images}: images, converted once, to {shards}")
    older = sorted(shards.parent.glob(f"{shards.name[:-DIGITS]}{'?' * DIGITS}"))
    if older:
        listed = ", ".join(f"{path} ({data_size(_bytes_in(path))})" for path in older[:OLDER_SHOWN])
        say(f"earlier states of {images}, to be removed once no run needs them: {listed}")


def make_data(typed: Work, work: Work) -> None:
    """Make the data of a work, unless that is done; raise NotMade if that fails.

    `typed` names the images, `work` the shards of them.
    """
    say_what_is_made(typed, work)
    if typed == work:  # the demo looks itself whether its archive is whole, too
        if work in (DEMO, demo_for_hosts()):
            _run(["-m", "rackrun.catdog", "demo", DEMO_FOLDER])
    elif is_to_make(typed, work):
        images = data_of(typed)
        try:
            _run(["-m", "rackrun.convert", "folder", images, data_of(work)])
        except NotMade as failure:
            if failure.exit_code < 128:  # its last line names options that a launch does not have
                command = f"{called('convert')} folder {shlex.quote(images)} SHARDS"
                say(f"options of convert belong to: {command}; then train with --data SHARDS")
            raise


def _states(folder: Path) -> Iterator[bytes]:
    """Yield name, size and time of each file, in the order of names."""
    for file in _files_in(folder, frozenset([folder.resolve()])):
        status = file.stat() if file.exists() else file.lstat()  # a link may lead nowhere
        state = f"{file.relative_to(folder)}\0{status.st_size}\0{status.st_mtime_ns}\n"
        yield os.fsencode(state)


def _files_in(folder: Path, around: frozenset[Path]) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            yield path
        elif (target := path.resolve()) not in around:  # a link may lead back up
            yield from _files_in(path, around | {target})


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _run(command: Sequence[str]) -> None:
    # It reports a Ctrl-C itself, and gets it from here: from the terminal it would get it twice.
    environment = {**os.environ, variables.TYPED: called("local")}  # how it calls commands
    program = [sys.executable, *command]
    with subprocess.Popen(program, env=environment, start_new_session=True) as making:
        while making.returncode is None:
            try:
                making.wait()
            except KeyboardInterrupt as interrupt:
                if interrupt.args:  # SIGTERM or SIGHUP, to this process alone
                    making.terminate()
                    raise
                os.killpg(making.pid, signal.SIGINT)
    if making.returncode:
        raise NotMade(making.returncode)
