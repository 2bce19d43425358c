"""Measure how fast images become shards, beside webdataset's ShardWriter and cp.

    python bench/convert.py [--images 4000] [--rounds 5]

Every contestant is a whole process that gets the same images of 110 KB, already in the page cache,
and is timed from start to end, in turn, for several rounds; the medians count. `cp` of the same
bytes is the limit. convert also writes digests, checks and the index, by default restart tiles, and
flushes each shard to the disk before it gets its name; the others leave their bytes in the page
cache.
"""

import io
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

from rackrun.commandline.parser import parse
from rackrun.commandline.program import run

CORES = 2
SHARDS = 16
IMAGE_BYTES = 110_000


@dataclass(frozen=True)
class Settings:
    """Rate of conversion: ours, ShardWriter's, and that of cp."""

    images: int = 4000
    """Images of about 110 KB."""
    rounds: int = 5
    """Times that every contestant runs."""
    scratch: Path = Path(tempfile.gettempdir())
    """Folder for the images and the shards: three times 110 KB a image."""


@dataclass(frozen=True)
class Run:
    """What one process has cost."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def main(args: list[str]) -> None:
    """Make the images, run all contestants in turn, print the table."""
    settings = parse(Settings, "python bench/convert.py", args)
    with tempfile.TemporaryDirectory(dir=settings.scratch) as name:
        folder = Path(name)
        archives = make_archives(folder, settings.images)
        runs: dict[str, list[Run]] = defaultdict(list)
        for _ in range(settings.rounds):
            for contestant, command in contestants(archives, folder / "out"):
                runs[contestant].append(timed(command))
                shutil.rmtree(folder / "out")
    print_table(runs, settings.images)


def contestants(archives: dict[str, Path], out: Path) -> Iterator[tuple[str, list[str]]]:
    """Name each contestant and its command line."""
    python = [sys.executable]
    folder, stored, deflated = (str(archives[kind]) for kind in ("folder", "stored", "deflated"))
    convert = [*python, "-m", "convert", "catdog"]
    yield "cp of the files", ["cp", "-r", folder, str(out)]
    for workers in (1, CORES):
        options = ["--shards", str(SHARDS), "--workers", str(workers)]
        tiled = f"convert, {workers} processes, restart tiles"
        yield tiled, [*convert, stored, str(out), *options]
    options.append("--no-tiles")
    yield f"convert, {CORES} processes", [*convert, stored, str(out), *options]
    yield f"convert, {CORES} processes, folder", [*convert, folder, str(out), *options]
    yield f"convert, {CORES} processes, deflated zip", [*convert, deflated, str(out), *options]
    for workers in (1, CORES):
        writer = [*python, __file__, "--shard-writer", stored, str(out), str(workers)]
        yield f"ShardWriter, {workers} processes", writer
    writer = [*python, __file__, "--shard-writer", folder, str(out), str(CORES)]
    yield f"ShardWriter, {CORES} processes, folder", writer


def timed(command: list[str]) -> Run:
    """Run a process to its end: wall seconds, CPU seconds and largest process of its tree."""
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
    _, status, usage = os.wait4(child, 0)
    seconds = time.monotonic() - start
    if status:
        raise SystemExit(f"{' '.join(command)}: exit code {os.waitstatus_to_exitcode(status)}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def print_table(runs: dict[str, list[Run]], images: int) -> None:
    """Print the medians, and their ratio to ShardWriter and cp."""
    print(f"{images:,} images of {IMAGE_BYTES / 1000:.0f} KB, medians of whole processes\n")
    print("| | s | images/s | CPU s per 1,000 | images per CPU s | largest process, MB |")
    print("|---|---|---|---|---|---|")
    for name, measured in runs.items():
        wall = median(measured, lambda run: run.seconds)
        cpu = median(measured, lambda run: run.cpu_seconds)
        peak = max(run.peak_bytes for run in measured)
        print(
            f"| {name} | {wall:.2f} | {images / wall:,.0f} | {cpu / images * 1000:.2f} "
            f"| {images / cpu:,.0f} | {peak / 1e6:.0f} |"
        )
    ours, writer = f"convert, {CORES} processes", f"ShardWriter, {CORES} processes"
    rates = {name: 1 / median(measured, lambda run: run.seconds) for name, measured in runs.items()}
    print(f"\nconvert / ShardWriter, both with {CORES} processes:")
    for source in ("", ", folder"):
        print(f"{rates[ours + source] / rates[writer + source]:.2f} times the rate{source}")
    print(f"convert / cp: {rates[ours] / rates['cp of the files']:.2f} of the limit")


def median(runs: list[Run], value: Callable[[Run], float]) -> float:
    """Return the median of the rounds."""
    return statistics.median(value(run) for run in runs)


def make_archives(folder: Path, images: int) -> dict[str, Path]:
    """Make the same images a folder, a stored zip and a deflated zip."""
    base = [photo(seed) for seed in range(16)]
    files = folder / "images"
    (files / "train").mkdir(parents=True)
    with (
        zipfile.ZipFile(folder / "stored.zip", "w", zipfile.ZIP_STORED) as stored,
        zipfile.ZipFile(folder / "deflated.zip", "w", zipfile.ZIP_DEFLATED) as deflated,
    ):
        for number in range(images):
            name = f"train/{('cat', 'dog')[number % 2]}.{number // 2}.jpg"
            image = commented(base[number % len(base)], f"{number:08d}")
            (files / name).write_bytes(image)
            stored.writestr(name, image)
            deflated.writestr(name, image)
    return {
        "folder": files,
        "stored": folder / "stored.zip",
        "deflated": folder / "deflated.zip",
    }


def photo(seed: int) -> bytes:
    """Return a JPEG of about 110 KB with as much detail as a photograph."""
    noise = random.Random(seed)
    image = Image.new("RGB", (500, 375))
    for side in (8, 32, 125, 500):
        layer = Image.frombytes("RGB", (side, side), noise.randbytes(3 * side * side))
        image = Image.blend(image, layer.resize(image.size, Image.Resampling.BICUBIC), 0.5)
    for quality in range(95, 5, -1):
        stored = io.BytesIO()
        image.save(stored, "JPEG", quality=quality)
        if stored.tell() <= IMAGE_BYTES:
            return stored.getvalue()
    raise ValueError("no quality gives 110 KB")


def commented(jpeg: bytes, text: str) -> bytes:
    """Return the same image with a comment, so that no two files are equal."""
    return jpeg[:2] + b"\xff\xfe" + (len(text) + 2).to_bytes(2, "big") + text.encode() + jpeg[2:]


def shard_writer(source: str, out: str, workers: int) -> None:
    """Convert as a user of webdataset would: zipfile or folder in, ShardWriter
    out, a part per process."""
    Path(out).mkdir()
    children = []
    for part in range(1, workers):
        child = os.fork()
        if not child:
            write_part(source, out, part, workers)
            os._exit(0)
        children.append(child)
    write_part(source, out, 0, workers)
    for child in children:
        os.waitpid(child, 0)


def write_part(source: str, out: str, part: int, parts: int) -> None:
    """Write every parts-th image of a zip or a folder into shards."""
    import webdataset

    names, read = images_of(Path(source))
    random.Random(0).shuffle(names)
    per_shard = -(-len(names) // SHARDS)
    pattern = f"{out}/part{part}-%06d.tar"
    with webdataset.ShardWriter(pattern, maxcount=per_shard, verbose=0) as sink:
        for name in islice(names, part, None, parts):
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
    if sys.argv[1:2] == ["--shard-writer"]:
        shard_writer(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        run(main)
