"""Rehearse ImageNet at its full size with small images: convert, verify, train an epoch, prove it.

    python -m bench.rehearsal [--images 1281167] [--side 32] [--ranks 4] [--scratch FOLDER]

The archives have the layout of the official ones: a tar of 1,000 tars, a tar of validation images
and their labels. Each image is a JPEG of its own. nginx serves the shards, the ranks train
one exact epoch of a small network, and what they trained on is compared with the data set.
Prints a line per step: seconds by the clock, CPU seconds, and the most memory that its processes
held together (proportional set size, sampled every half second).
"""

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path

import numpy as np

from bench.images import small
from bench.usage import PeakMemory, children_mb
from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from rackrun.convert.devkit import MAPPING, SOLUTION
from tests.training.trained_rows import NOTED, exact_epochs

ROOT = Path(__file__).parents[1]
CLASSES = 1000
VALIDATION_IMAGES = 50 * CLASSES
TRAIN, VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"


@dataclass(frozen=True)
class Settings:
    """Convert, serve and train an ImageNet of small images."""

    images: int = 1_281_167
    """Training images; less than ImageNet's are converted with --subset."""
    side: int = 32
    """Side of the images, in pixels."""
    ranks: int = 4
    """Ranks on this machine."""
    batch_size: int = 256
    """Images per step on each rank."""
    scratch: Path = Path(tempfile.gettempdir())
    """Folder for archives and shards: 4 kB per image."""


def main(args: list[str]) -> None:
    """Do one step after the other and print what each cost."""
    settings = parse(Settings, "python -m bench.rehearsal", args)
    with tempfile.TemporaryDirectory(dir=settings.scratch) as folder:
        root = Path(folder)
        print(f"{'':24}{'clock s':>10}{'CPU s':>10}{'peak MB':>10}", flush=True)
        for name, command in steps(root, settings):
            measured(name, command, root)
        exact_epochs(root / "run")
        stored = sum(file.stat().st_size for file in (root / "shards").rglob("*.tar"))
        print(f"{stored / 1e9:.2f} GB of shards")


def steps(root: Path, settings: Settings) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the command of each step."""
    archives, shards, trained = (str(root / name) for name in ("archives", "shards", "run"))
    python = [sys.executable, "-m"]
    subset = [] if settings.images == Settings.images else ["--subset"]
    drawing = [str(settings.images), str(settings.side), archives]
    yield "draw", [*python, "bench.rehearsal", "draw", *drawing]
    yield "convert imagenet", [*python, "convert", "imagenet", archives, shards, *subset]
    yield "convert verify", [*python, "convert", "verify", shards]
    yield (
        f"train, {settings.ranks} ranks",
        [*python, "rackrun", "local", f"--nproc={settings.ranks}", "--serve", "imagenet"]
        + [f"--data={shards}", "--exact-epochs", "--model=bench.small_net:net"]
        + [f"--image-size={settings.side}", f"--batch-size={settings.batch_size}", "--lr=0.01"]
        + ["--epochs=1", "--warmup-epochs=0", f"--run-folder={trained}"],
    )


def measured(name: str, command: list[str], root: Path) -> None:
    """Run a command and print its line; what it printed goes to a file, shown if it fails."""
    log = root / "log"
    before, begun = sum(os.times()[2:4]), time.monotonic()
    with log.open("wb") as output, PeakMemory(children_mb, 0.5) as memory:
        code = subprocess.run(
            command,
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | NOTED | {"PYTHONPATH": str(ROOT)},  # of the network
        ).returncode
    seconds, cpu = time.monotonic() - begun, sum(os.times()[2:4]) - before
    print(f"{name:24}{seconds:10.1f}{cpu:10.1f}{memory.mb:10.0f}", flush=True)
    print(
        "".join(f"    {line}\n" for line in log.read_text().splitlines()[-3:]), end="", flush=True
    )
    if code:
        sys.exit(f"{' '.join(command)}: exit code {code}\n{log.read_text()}")


def draw(images: int, side: int, folder: Path) -> None:
    """Write the archives: a tar of a tar for each class, the validation images, two tables."""
    folder.mkdir()
    wnids = [f"n{number:08}" for number in range(CLASSES)]
    (folder / MAPPING).write_text("".join(f"{wnid} thing {wnid}\n" for wnid in wnids))
    counts = [len(range(number, images, CLASSES)) for number in range(CLASSES)]
    with Pool() as pool, tarfile.open(folder / TRAIN, "w", format=tarfile.GNU_FORMAT) as archive:
        jobs = [(*job, side) for job in zip(wnids, counts, strict=True)]
        for wnid, data in zip(wnids, pool.imap(class_tar, jobs), strict=True):
            add(archive, f"{wnid}.tar", data)
    with tarfile.open(folder / VAL, "w", format=tarfile.GNU_FORMAT) as archive:
        rng = np.random.default_rng(CLASSES)
        for number in range(1, VALIDATION_IMAGES + 1):
            add(archive, f"ILSVRC2012_val_{number:08}.JPEG", small(rng, side))
    rows = (
        f"ILSVRC2012_val_{number + 1:08},{wnids[number % CLASSES]} 0 0 1 1\n"
        for number in range(VALIDATION_IMAGES)
    )
    (folder / SOLUTION).write_text("ImageId,PredictionString\n" + "".join(rows))


def class_tar(job: tuple[str, int, int]) -> bytes:
    """Return the tar of a class's training images."""
    wnid, count, side = job
    rng = np.random.default_rng(int(wnid[1:]))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for number in range(count):
            add(archive, f"{wnid}_{number}.JPEG", small(rng, side))
    return buffer.getvalue()


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    """Append a file to a tar."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


if __name__ == "__main__":
    if sys.argv[1:2] == ["draw"]:
        draw(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        run(main)
