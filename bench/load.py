"""Measure how fast images become batches: rackrun's loader, its peers, and pure decoding.

    python -m bench.load [--peers PYTHON] [--rounds 3] [--seconds 6]

Every contestant makes batches of 64 x 3 x 224 x 224, randomly cropped, from the same JPEGs of about
110 KB (500 x 375, spectrum and edges of photographs) in the page cache, with two workers. They run
in turn, several rounds; the medians count, and so do ratios rather than rates. MosaicML Streaming
and litData take part if --peers names a Python that has them installed beside torch.
"""

import io
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from PIL import Image

from convert.folder import FolderOfClasses
from convert.options import Packing
from nginx.serve import serving
from nginx.site import Site
from rackrun.commandline import parse, run

CONTESTANTS = Path(__file__).with_name("load_contestants.py")
ROOT = Path(__file__).parents[1]
CLASSES = 10
COPIES = 8  # of each image, under another name: decoding one costs the same every time
QUALITY = 92

NAMES = {
    "ours-folder": "rackrun, from a folder",
    "tiles-folder": "rackrun, restart tiles",
    "ours-nginx": "rackrun, from nginx",
    "ours-exact": "rackrun, exact epochs, from a folder",
    "ours-exact-nginx": "rackrun, exact epochs, from nginx",
    "webdataset-stock": "webdataset as in its examples",
    "folder-stock": "ImageFolder as in its examples",
    "webdataset-uint8": "webdataset, torchvision.io, uint8",
    "folder-uint8": "ImageFolder, torchvision.io, uint8",
    "mds-uint8": "MosaicML Streaming, torchvision.io, uint8",
    "lit-uint8": "litData, torchvision.io, uint8",
    "decode": "only decoding, whole images",
}
PEERS = ("mds-uint8", "lit-uint8")


@dataclass(frozen=True)
class Settings:
    """Rates of loaders."""

    images: int = 4000
    """Images of about 110 KB: an epoch lasts as long as a measurement."""
    rounds: int = 3
    """Times that every contestant runs."""
    seconds: float = 4.0
    """Length of each measurement."""
    peers: str = ""
    """A Python with mosaicml-streaming and litdata; without it they do not take part."""
    scratch: Path = Path(tempfile.gettempdir())
    """Folder for the images, five times 110 KB each."""


def main(args: list[str]) -> None:
    """Make the images, run all contestants in turn, print the table."""
    settings = parse(Settings, "python -m bench.load", args)
    with tempfile.TemporaryDirectory(dir=settings.scratch) as name:
        places = prepared(Path(name), settings)
        with serving(Site(Path(name) / "shards", port=0, native=True)) as server:
            places |= {"ours-nginx": server.url, "ours-exact-nginx": server.url}
            report(list(measured(places, settings)), settings)


def prepared(root: Path, settings: Settings) -> dict[str, str]:
    """Return where each contestant finds its images."""
    sys.stderr.write("drawing images\n")
    with Pool(2) as pool:
        drawn = pool.map(photo, range(settings.images // COPIES))
    for number in range(settings.images):
        path = root / "images" / f"class{number % CLASSES}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(drawn[number % len(drawn)])
    for form, tiles in (("shards", False), ("tiles", True)):
        packing = Packing(shards=16, tiles=tiles)
        FolderOfClasses(root / "images", root / form, packing=packing).run()
    places = {"folder": "images", "webdataset": "shards", "ours": "shards", "decode": "images"}
    places["tiles"] = "tiles"
    found = {
        name: str(root / places[name.partition("-")[0]]) for name in NAMES if name not in PEERS
    }
    for name in PEERS if settings.peers else ():
        form = name.partition("-")[0]
        found[name] = str(root / form)
        contestant(settings.peers, f"write-{form}", str(root / "images"), found[name])
    return found


def photo(seed: int) -> bytes:
    """Return a JPEG with the spectrum and the edges of a photograph."""
    draw = np.random.default_rng(seed)
    height, width = (375, 500) if seed % 4 else (500, 375)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1
    noise = np.fft.rfft2(draw.standard_normal((3, height, width)))
    falloff = frequency ** np.array([1.15, 1.5, 1.5])[:, None, None]
    planes = np.fft.irfft2(noise / falloff, s=(height, width))
    planes /= planes.std(axis=(1, 2), keepdims=True)
    down, across = np.mgrid[:height, :width]
    for _ in range(12):
        top, left, radius = draw.uniform((0, 0, 10), (height, width, 120))
        disc = np.hypot(down - top, across - left) < radius
        planes[:, disc] += draw.standard_normal((3, 1))
    tones = np.clip(128 + planes * np.array([48, 22, 22])[:, None, None], 0, 255)
    buffer = io.BytesIO()
    image = Image.fromarray(tones.astype(np.uint8).transpose(1, 2, 0), "YCbCr")
    image.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def measured(places: dict[str, str], settings: Settings) -> Iterator[tuple[str, dict[str, float]]]:
    """Return every contestant's result in every round."""
    for number in range(settings.rounds):
        for name in NAMES:
            if name in places:
                sys.stderr.write(f"round {number + 1}: {NAMES[name]}\n")
                python = settings.peers if name in PEERS else sys.executable
                seconds = str(settings.seconds)
                yield name, json.loads(contestant(python, name, places[name], seconds))


def contestant(python: str, *words: str) -> str:
    """Return what a contestant prints."""
    done = subprocess.run(
        [python, "-P", str(CONTESTANTS), *words],
        stdout=subprocess.PIPE, check=True, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    return done.stdout.decode().strip().splitlines()[-1] if done.stdout else ""


def report(results: list[tuple[str, dict[str, float]]], settings: Settings) -> None:
    """Print a line per contestant: medians over the rounds, and its rate over ours."""
    medians = {}
    for name, first in results[: len(results) // settings.rounds]:
        own = [one for who, one in results if who == name]
        medians[name] = {key: statistics.median(one[key] for one in own) for key in first}
    base = medians["ours-folder"]
    print(f"{'':44}images/s   ours is   per CPU second   ours is   first batch   workers grow")
    for name, one in medians.items():
        print(
            f"{NAMES[name]:44}{one['rate']:8.0f}  {base['rate'] / one['rate']:7.2f}x"
            f"  {one['per_cpu_second']:15.0f}"
            f"  {base['per_cpu_second'] / one['per_cpu_second']:7.2f}x"
            f"  {one['first_batch_seconds']:10.1f} s  {one['worker_growth_mib']:8.1f} MiB"
        )


if __name__ == "__main__":
    run(main)
