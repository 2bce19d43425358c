"""Measure how fast images become shards, beside webdataset's ShardWriter and cp.

    python -m bench.convert [--images 4000] [--rounds 5]

Every contestant is a whole process that gets the same images of about 110 KB, already in the page
cache, and is timed from start to end, in turn, for several rounds; the medians count. `cp` of the
same bytes is the limit. convert also writes digests, checks and the index, and flushes each shard
to the disk before it gets its name; the others leave their bytes in the page cache.
"""

import os
import random
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.images import commented, photos
from bench.turns import in_turn
from rackrun.commandline.parser import parse
from rackrun.commandline.program import run

CORES = 2
SHARDS = 16


@dataclass(frozen=True)
class Settings:
    """Rate of conversion: ours, ShardWriter's, and that of cp."""

    images: int = 4000
    """Images of about 110 KB."""
    rounds: int = 5
    """Times that every contestant runs."""
    scratch: Path = Path(tempfile.gettempdir())
    """Folder for the images and the shards: three times 110 KB a image."""


class Cost(NamedTuple):
    """What one process has cost."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    """Peak memory of the largest process."""


def main(args: list[str]) -> None:
    """Make the images, run all contestants in turn, print the table."""
    settings = parse(Settings, "python -m bench.convert", args)
    with tempfile.TemporaryDirectory(dir=settings.scratch) as name:
        archives = make_archives(Path(name), settings.images)
        out = Path(name) / "out"
        runs = {
            contestant: partial(measured, command, out)
            for contestant, command in contestants(archives, out).items()
        }
        print_table(in_turn(settings.rounds, runs), settings.images)


def make_archives(folder: Path, images: int) -> dict[str, Path]:
    """Make the same images a folder and a zip."""
    base = photos(16)
    paths = {kind: folder / kind for kind in ("folder", "stored.zip")}
    (paths["folder"] / "train").mkdir(parents=True)
    with zipfile.ZipFile(paths["stored.zip"], "w", zipfile.ZIP_STORED) as stored:
        for number in range(images):
            name = f"train/{('cat', 'dog')[number % 2]}.{number // 2}.jpg"
            image = commented(base[number % len(base)], f"{number:08d}")
            (paths["folder"] / name).write_bytes(image)
            stored.writestr(name, image)
    return paths


def contestants(archives: dict[str, Path], out: Path) -> dict[str, list[str]]:
    """Return the command line of each contestant by its name."""
    folder, stored = map(str, archives.values())

    def convert(source: str) -> list[str]:
        sizes = (f"--shards={SHARDS}", f"--workers={CORES}")
        return [sys.executable, "-m", "rackrun.convert", "catdog", source, str(out), *sizes]

    def shard_writer(source: str) -> list[str]:
        return [sys.executable, "-m", "bench.convert", SHARD_WRITER, source, str(out)]

    return {
        "cp of the files": ["cp", "-r", folder, str(out)],
        f"convert, {CORES} processes": convert(stored),
        f"convert, {CORES} processes, folder": convert(folder),
        f"ShardWriter, {CORES} processes": shard_writer(stored),
        f"ShardWriter, {CORES} processes, folder": shard_writer(folder),
    }


def measured(command: list[str], out: Path) -> Cost:
    """Run a process to its end, and remove what it has written."""
    os.sync()  # so that no run pays for what an earlier one has left to be written
    start = time.monotonic()
    child = os.posix_spawn(
        shutil.which(command[0]) or command[0],
        command,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)
        ],
    )
    _, status, usage = os.wait4(child, 0)  # its usage, without that of other children
    seconds = time.monotonic() - start
    if status:
        raise SystemExit(f"{' '.join(command)}: exit code {os.waitstatus_to_exitcode(status)}")
    shutil.rmtree(out)
    return Cost(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def print_table(runs: dict[str, list[Cost]], images: int) -> None:
    """Print the medians, and their ratio to ShardWriter and cp."""
    print(f"{images:,} images of about 110 KB, medians of whole processes\n")
    print("| | s | images/s | CPU s per 1,000 | images per CPU s | largest process, MB |")
    print("|---|---|---|---|---|---|")
    rates = {}
    for name, costs in runs.items():
        wall, cpu = (median(cost[field] for cost in costs) for field in (0, 1))
        rates[name] = images / wall
        peak = max(cost.peak_bytes for cost in costs)
        print(
            f"| {name} | {wall:.2f} | {images / wall:,.0f} | {cpu / images * 1000:.2f} "
            f"| {images / cpu:,.0f} | {peak / 1e6:.0f} |"
        )
    ours, writer = f"convert, {CORES} processes", f"ShardWriter, {CORES} processes"
    print(f"\nconvert / ShardWriter, both with {CORES} processes:")
    for source in ("", ", folder"):
        print(f"{rates[ours + source] / rates[writer + source]:.2f} times the rate{source}")
    print(f"convert / cp: {rates[ours] / rates['cp of the files']:.2f} of the limit")


SHARD_WRITER = "--shard-writer"
"""The first argument of the processes that this program starts to convert with webdataset."""


def shard_writer(source: str, out: str) -> None:
    """Convert as a user of webdataset would: a zip or a folder in, a part of it per process."""
    Path(out).mkdir()
    with get_context("fork").Pool(CORES) as pool:
        pool.starmap(write_part, [(source, out, part) for part in range(CORES)], chunksize=1)


def write_part(source: str, out: str, part: int) -> None:
    """Write a process's part of the images of a zip or a folder into shards."""
    import webdataset

    names, read = images_of(Path(source))
    random.Random(0).shuffle(names)
    per_shard = -(-len(names) // SHARDS)
    pattern = f"{out}/part{part}-%06d.tar"
    with webdataset.ShardWriter(pattern, maxcount=per_shard, verbose=0) as sink:
        for name in islice(names, part, None, CORES):
            sink.write(sample(name, read(name)))


def images_of(source: Path) -> tuple[list[str], Callable[[str], bytes]]:
    """Return the names of a zip's or a folder's images, and what reads one."""
    if source.is_dir():
        names = [f"train/{file.name}" for file in (source / "train").iterdir()]
        return names, lambda name: (source / name).read_bytes()
    archive = zipfile.ZipFile(source)
    return archive.namelist(), archive.read


def sample(name: str, image: bytes) -> dict[str, Any]:
    """Return an image as ShardWriter takes it."""
    stem = Path(name).stem.replace(".", "_")
    return {"__key__": stem, "cls": int(stem.startswith("dog")), "jpg": image}


if __name__ == "__main__":
    if sys.argv[1:2] == [SHARD_WRITER]:
        shard_writer(*sys.argv[2:4])
    else:
        run(main)
