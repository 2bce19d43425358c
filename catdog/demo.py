"""The demo set: drawn cats and dogs in OUT/train.zip, and as shards in OUT/shards."""

import fcntl
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from tyro.conf import Positional

from rackrun.atomic import partials, translated_os_errors
from rackrun.commandline import parse
from rackrun.errors import DataError, UsageError
from shards.index import MANIFEST_NAME


@dataclass(frozen=True)
class Demo:
    """Draw cats and dogs, and convert them to shards; what is there already is left alone."""

    out: Positional[Path]
    """Folder for train.zip and shards/."""
    pictures: int = 4000
    """How many, half of them cats."""
    seed: int = 0
    """Other seeds give other pictures."""

    def __post_init__(self) -> None:
        """Refuse too few pictures to train on."""
        if not 20 <= self.pictures <= 25_000:
            raise UsageError(f"--pictures {self.pictures}: type a number from 20 to 25000")

    @property
    def archive(self) -> Path:
        """The drawn pictures."""
        return self.out / "train.zip"

    @property
    def shards(self) -> Path:
        """The same as shards."""
        return self.out / "shards"

    @property
    def manifest(self) -> Path:
        """There once the shards are complete."""
        return self.shards / MANIFEST_NAME

    @property
    def lock(self) -> Path:
        """Locked while the set is being made."""
        return self.out / ".lock"

    @property
    def stamp(self) -> str:
        """What the archive's comment says of its contents."""
        return f"rackrun demo: {self.pictures} drawn pictures, seed {self.seed}"


def main(args: list[str]) -> int:
    """`python -m catdog demo OUT`: make what is missing; the exit code."""
    demo = parse(Demo, "python -m catdog demo", args)
    if not (_has_drawn(demo) and demo.manifest.exists()):
        with translated_os_errors(demo.out):
            demo.out.mkdir(parents=True, exist_ok=True)
        with _alone(demo):
            if code := _make(demo):
                return code
    _say(f"{demo.shards}: {demo.pictures:,} drawn cats and dogs")
    return 0


def _make(demo: Demo) -> int:
    """Draw and convert, as far as that has not been done; the exit code."""
    if not _has_drawn(demo):
        _draw(demo)
    return 0 if demo.manifest.exists() else _convert(demo)


@contextmanager
def _alone(demo: Demo) -> Iterator[None]:
    """Let nobody else make the same set at the same time: a second one waits and finds it made."""
    with translated_os_errors(demo.lock):
        lock = demo.lock.open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another process is making {demo.out}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _has_drawn(demo: Demo) -> bool:
    """Whether the archive is there; UsageError if it is another one."""
    if not demo.archive.exists():
        return False
    try:
        with ZipFile(demo.archive) as archive:
            stamp = archive.comment.decode(errors="replace")
    except BadZipFile:
        raise DataError(f"{demo.archive}: not a zip archive; type: rm {demo.archive}") from None
    if stamp != demo.stamp:
        raise UsageError(
            f"{demo.archive} is another archive ({stamp or 'not a demo'}); choose another folder"
        )
    return True


def _draw(demo: Demo) -> None:
    from catdog.drawings.archive import write_archive  # costs --help too much

    for left_over in partials(demo.out):  # of one that was killed
        left_over.unlink()
    start = time.monotonic()
    with _progress(demo) as tell:
        write_archive(demo.archive, demo.pictures, demo.seed, comment=demo.stamp, tell=tell)
    seconds = time.monotonic() - start
    speed = f"{seconds:.0f} s ({demo.pictures / seconds:,.0f}/s)"
    _say(f"drew {demo.pictures:,} cats and dogs into {demo.archive} in {speed}")


@contextmanager
def _progress(demo: Demo) -> Iterator[Callable[[], object]]:
    """A bar on a terminal, one line elsewhere."""
    what = f"drawing {demo.pictures:,} cats and dogs"
    if not sys.stdout.isatty():
        _say(what)
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task(what, total=demo.pictures)
        yield lambda: progress.advance(task)


def _convert(demo: Demo) -> int:
    """Run the converter as a user would, showing the command; its exit code."""
    command = ["-m", "convert", "catdog", str(demo.archive), str(demo.shards)]
    _say(f"$ {shlex.join(['python', *command])}")
    with subprocess.Popen([sys.executable, *command]) as converter:
        try:
            return converter.wait()
        except KeyboardInterrupt:  # reached the converter too: it has its own way to end
            converter.wait()
            raise
        except SystemExit:  # a SIGTERM to this process alone
            converter.terminate()
            raise


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
