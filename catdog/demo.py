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
from typing import ClassVar
from zipfile import BadZipFile, ZipFile, ZipInfo

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from rackrun.atomic import atomic_write, partials, translated_os_errors
from rackrun.catdog.drawing import KINDS, jpeg
from rackrun.commandline.options import Examples, Positional
from rackrun.commandline.parser import parse
from rackrun.commands import called
from rackrun.contract.files import MANIFEST_NAME
from rackrun.errors import DataError, UsageError


@dataclass(frozen=True)
class Demo:
    """Draw cats and dogs and convert them to shards; existing files stay."""

    examples: ClassVar[Examples] = (
        ("{prog} data/demo", "draw 4,000 images"),
        ("{prog} data/demo --images 400", "draw fewer"),
    )

    out: Positional[Path]
    """Folder for train.zip and shards/."""
    images: int = 4000
    """Number of images, half of them cats."""
    seed: int = 0
    """Seed of the drawings."""

    def __post_init__(self) -> None:
        """Refuse too few images to train on."""
        if not 20 <= self.images <= 25_000:
            raise UsageError(f"--images {self.images}: type a number from 20 to 25000")

    @property
    def archive(self) -> Path:
        """The zip of drawn images."""
        return self.out / "train.zip"

    @property
    def shards(self) -> Path:
        """The folder of their shards."""
        return self.out / "shards"

    @property
    def manifest(self) -> Path:
        """The manifest of the shards, which is written last."""
        return self.shards / MANIFEST_NAME

    @property
    def stamp(self) -> str:
        """The comment of the archive, which names its content."""
        return f"rackrun demo: {self.images} drawn pictures, seed {self.seed}"


def main(args: list[str]) -> int:
    """Make what is missing, as `python -m rackrun.catdog demo OUT`; return the exit code."""
    demo = parse(Demo, "python -m rackrun.catdog demo", args)
    if not (_has_drawn(demo) and demo.manifest.exists()):
        with translated_os_errors(demo.out):
            demo.out.mkdir(parents=True, exist_ok=True)
        with _alone(demo):  # what is missing may have been made by another process meanwhile
            if not _has_drawn(demo):
                _draw(demo)
            if not demo.manifest.exists() and (code := _convert(demo)):
                return code
    _say(f"{demo.shards}: {demo.images:,} drawn cats and dogs")
    return 0


@contextmanager
def _alone(demo: Demo) -> Iterator[None]:
    path = demo.out / ".lock"
    with translated_os_errors(path):
        lock = path.open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another process is making {demo.out}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _has_drawn(demo: Demo) -> bool:
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
    for left_over in partials(demo.out):  # of one that was killed
        left_over.unlink()
    start = time.monotonic()
    with _progress(demo) as advance:
        write_archive(demo.archive, demo.images, demo.seed, comment=demo.stamp, tell=advance)
    seconds = time.monotonic() - start
    speed = f"{seconds:.0f} s ({demo.images / seconds:,.0f}/s)"
    _say(f"drew {demo.images:,} cats and dogs into {demo.archive} in {speed}")


def write_archive(
    path: Path,
    images: int,
    seed: int = 0,
    comment: str = "",
    tell: Callable[[], object] = lambda: None,
) -> None:
    """Write drawn images, cats and dogs in turn, in an archive as Kaggle's `train.zip`.

    `tell` is called after each image. SaveError if it cannot be written, whole or not at all.
    """
    with atomic_write(path) as file, translated_os_errors(path), ZipFile(file, "w") as archive:
        archive.comment = comment.encode()
        for position in range(images):
            number, kind = divmod(position, len(KINDS))
            name = f"train/{KINDS[kind]}.{number}.jpg"
            archive.writestr(ZipInfo(name), jpeg(KINDS[kind], seed, number))
            tell()


@contextmanager
def _progress(demo: Demo) -> Iterator[Callable[[], object]]:
    what = f"drawing {demo.images:,} cats and dogs"
    if not sys.stdout.isatty():
        _say(what)
        yield lambda: None
        return
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task(what, total=demo.images)
        yield lambda: progress.advance(task)


def _convert(demo: Demo) -> int:
    # By its command line: the command that is shown is the one that runs.
    args = ["catdog", str(demo.archive), str(demo.shards)]
    _say(f"$ {called('convert')} {shlex.join(args)}")
    with subprocess.Popen([sys.executable, "-m", "rackrun.convert", *args]) as converter:
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
