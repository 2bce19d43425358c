"""Measure how fast images become batches: rackrun's loader, its peers, and pure decoding.

    bench/install_peers.sh /tmp/peers
    python -m bench.peers --peers /tmp/peers/bin/python [--rounds 7]

Every contestant makes batches of 64 x 3 x 224 x 224, cropped and mirrored at random, from the same
JPEGs of about 110 KB (500 x 375, spectrum and edges of photographs) in the page cache, with two
workers or threads. They run in turn, several rounds. The table gives the median, the least and the
most CPU time of the whole process tree per image, its ratio to pure decoding (the median of the
ratios within each round), images per second by the clock, and the disk space beside that of the
JPEGs. FFCV has a format of its own; its second set holds images that are encoded again at quality
90. SPDL's published pipeline resizes to 256 pixels and takes the center. Two rows are of the same
images with a shorter side of 256, in ratio to decoding those. Peers that are not installed in the
Python of bench/install_peers.sh take part only if --peers names it.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from bench.images import write_images
from bench.turns import in_turn
from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from rackrun.convert.folder import FolderOfClasses
from rackrun.convert.options import Packing
from rackrun.errors import UsageError
from rackrun.nginx.serve import serving
from rackrun.nginx.site import Site
from rackrun.user_code.sources import nearest

LOADERS = Path(__file__).with_name("peer_loaders.py")
ROOT = Path(__file__).parents[1]
OURS, LIMIT = "ours-folder", "decode"
SMALL, SMALL_SIDE = "-256", 256  # what ends so takes images with this shorter side, in pixels

NAMES = {
    "ours-folder": "rackrun, from a folder",
    "ours-nginx": "rackrun, from nginx",
    "ours-exact": "rackrun, exact epochs, from a folder",
    "ours-exact-nginx": "rackrun, exact epochs, from nginx",
    "webdataset-stock": "webdataset as in its examples",
    "folder-stock": "ImageFolder as in its examples",
    "webdataset-uint8": "webdataset, torchvision.io, uint8",
    "folder-uint8": "ImageFolder, torchvision.io, uint8",
    "mds-uint8": "MosaicML Streaming, torchvision.io, uint8",
    "lit-uint8": "litData, torchvision.io, uint8",
    "dali": "DALI on the CPU, uint8",
    "spdl": "SPDL as in its ImageNet example, threads",
    "ffcv-raw": "FFCV, raw pixels, uint8",
    "ffcv-q90": "FFCV, JPEG of quality 90, uint8",
    "decode": "only decoding, whole images",
    "ours-256": "rackrun, shorter side 256",
    "decode-256": "only decoding, shorter side 256",
}
PEERS = ("mds-uint8", "lit-uint8", "dali", "spdl", "ffcv-raw", "ffcv-q90")
WRITTEN = ("mds", "lit", "ffcv-raw", "ffcv-q90")  # in a format of their own


Result = dict[str, float]
"""What a contestant measured in a round: rate, cpu_ms, first_batch_seconds."""


@dataclass(frozen=True)
class Settings:
    """Rates of loaders."""

    images: int = 4000
    """Images of about 110 KB: an epoch lasts as long as a measurement."""
    rounds: int = 7
    """Times that every contestant runs."""
    seconds: float = 4.0
    """Length of each measurement."""
    peers: str = ""
    """A Python with the peers, as bench/install_peers.sh installs it; without it few take part."""
    only: tuple[str, ...] = ()
    """Names of the contestants that take part beside ours-folder and decode; none: all."""
    scratch: Path = Path(tempfile.gettempdir())
    """Folder for the images: twelve times 110 KB each, most of it FFCV's raw pixels."""

    def __post_init__(self) -> None:
        """Refuse names that no contestant has."""
        if unknown := set(self.only) - NAMES.keys():
            why = f"no such contestant; {nearest(min(unknown), NAMES)}"
            raise UsageError(f"--only {min(unknown)}: {why}")

    @property
    def contestants(self) -> list[str]:
        """Return the names of those that take part, ours first."""
        named = self.only or tuple(NAMES)
        chosen = {OURS, LIMIT, *named, *map(limit_of, named)}
        return [name for name in NAMES if name in chosen and (self.peers or name not in PEERS)]


def limit_of(name: str) -> str:
    """Return the contestant that only decodes the same images."""
    return LIMIT + SMALL if name.endswith(SMALL) else LIMIT


def main(args: list[str]) -> None:
    """Make the images, run all contestants in turn, print the table."""
    settings = parse(Settings, "python -m bench.peers", args)
    with tempfile.TemporaryDirectory(dir=settings.scratch) as name:
        locations = prepared(Path(name), settings)
        with serving(Site(Path(name) / "full/shards", port=0, native=True)) as server:
            disk = {name: disk_bytes(Path(path)) for name, path in locations.items()}
            locations |= {name: server.url for name in locations if name.endswith("-nginx")}
            loaders = {
                name: partial(measured, settings, name, location)
                for name, location in locations.items()
            }
            report(in_turn(settings.rounds, loaders), disk, settings)


def disk_bytes(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def prepared(root: Path, settings: Settings) -> dict[str, str]:
    """Return where each contestant finds its images."""
    sizes = {"full": 0, "small": SMALL_SIDE}
    if not any(name.endswith(SMALL) for name in settings.contestants):
        del sizes["small"]
    for size, short_side in sizes.items():
        images = write_images(root / size, settings.images, short_side)
        FolderOfClasses(images, root / size / "shards", packing=Packing(shards=16)).run()
    folders = {"folder": "images", "webdataset": "shards", "ours": "shards"}
    locations = {}
    for name in settings.contestants:
        size = root / ("small" if name.endswith(SMALL) else "full")
        form = name if name in WRITTEN else name.partition("-")[0]
        locations[name] = str(size / folders.get(form, form if form in WRITTEN else "images"))
        if form in WRITTEN:
            sys.stderr.write(f"writing the format of {NAMES[name]}\n")
            contestant(settings.peers, f"write-{form}", str(size / "images"), locations[name])
    return locations


def measured(settings: Settings, name: str, location: str) -> Result:
    """Return what a contestant measures in a process of its own."""
    python = settings.peers if name in PEERS else sys.executable
    result: Result = json.loads(contestant(python, name, location, str(settings.seconds)))
    return result


def contestant(python: str, *args: str) -> str:
    """Return what a contestant prints."""
    done = subprocess.run(
        [python, "-P", str(LOADERS), *args],
        stdout=subprocess.PIPE, check=True, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    return done.stdout.decode().strip().splitlines()[-1] if done.stdout else ""


def report(results: dict[str, list[Result]], disk: dict[str, int], settings: Settings) -> None:
    """Print a Markdown table: a row per contestant, medians over the rounds."""
    print(f"{settings.images:,} images, {settings.rounds} rounds of {settings.seconds:g} s\n")
    print("| | CPU ms an image | least, most | of decoding | images/s | first batch | disk |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, rounds in results.items():
        limit = limit_of(name)
        cpu = [result["cpu_ms"] for result in rounds]
        # Within each round, as the machine may slow down from one to the next.
        ratios = [ms / result["cpu_ms"] for ms, result in zip(cpu, results[limit], strict=True)]
        rate, first = (
            median(result[key] for result in rounds) for key in ("rate", "first_batch_seconds")
        )
        space = f"{disk[name] / disk[limit]:.2f}" if name != limit else ""
        print(
            f"| {NAMES[name]} | {median(cpu):.2f} | {min(cpu):.2f}, {max(cpu):.2f} |"
            f" {median(ratios):.2f} | {rate:,.0f} | {first:.1f} s | {space} |"
        )


if __name__ == "__main__":
    run(main)
