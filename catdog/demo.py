"""The demo set: drawn cats and dogs in OUT/train.zip, and as shards in OUT/shards."""

import fcntl
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from zipfile import BadZipFile, ZipFile, ZipInfo

from rich.progress import track

from rackrun.atomic import atomic_write, partials, translated_os_errors
from rackrun.catdog.drawing import KINDS, jpeg
from rackrun.commandline.options import Examples, Positional
from rackrun.commandline.parser import parse
from rackrun.commands import called
from rackrun.contract.files import MANIFEST_NAME
from rackrun.convert.commands import read
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
            if not demo.manifest.exists():
                _convert(demo)
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
    what = f"drawing {demo.images:,} cats and dogs"
    if not sys.stdout.isatty():
        _say(what)
    start = time.monotonic()
    write_archive(demo.archive, demo.images, demo.seed, comment=demo.stamp, shown_as=what)
    seconds = time.monotonic() - start
    speed = f"{seconds:.0f} s ({demo.images / seconds:,.0f}/s)"
    _say(f"drew {demo.images:,} cats and dogs into {demo.archive} in {speed}")


def write_archive(
    path: Path, images: int, seed: int = 0, comment: str = "", shown_as: str = ""
) -> None:
    """Write drawn images, cats and dogs in turn, in an archive as Kaggle's `train.zip`.

    SaveError if it cannot be written, whole or not at all. A terminal shows progress, if that is
    `shown_as` something.
    """
    is_shown = sys.stdout.isatty() and bool(shown_as)
    positions = track(range(images), shown_as, transient=True, disable=not is_shown)
    with atomic_write(path) as file, translated_os_errors(path), ZipFile(file, "w") as archive:
        archive.comment = comment.encode()
        for position in positions:
            number, kind = divmod(position, len(KINDS))
            name = f"train/{KINDS[kind]}.{number}.jpg"
            archive.writestr(ZipInfo(name), jpeg(KINDS[kind], seed, number))


def _convert(demo: Demo) -> None:
    args = ["catdog", str(demo.archive), str(demo.shards)]
    _say(f"$ {called('convert')} {shlex.join(args)}")
    read(args).run()


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
