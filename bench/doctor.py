"""What `rackrun doctor` finds of what was planted, and what it costs.

    python -m bench.doctor digits [--seeds 0 --seeds 1]   labels, near copies and leaks found
    python -m bench.doctor messy [--out messy]            only write such a set, as folders
    python -m bench.doctor photographs                    near copies by kind of change
    python -m bench.doctor exact [--images 100000]        CPU of exact copies, from the index
    python -m bench.doctor cost [--images 2000]           CPU of the rest but labels, by image

digits: scikit-learn's 1,797 real digits, 28 x 28 pixels, 360 of them for validation; 5 % of all
labels flipped, 3 % near copies added, 20 validation images copied into train; a model of the task
mnist, trained on just that, judges the labels.

photographs: the real photographs of scikit-learn (2) and, where it is installed, scikit-image (up
to 18), each whole and in tiles of 240 pixels; with 400 digits and 100 faces of 25 x 25 pixels,
which are images of one kind. Each is changed in every way, and looked for among all of them.
"""

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps

from bench.images import commented, jpeg
from rackrun.commandline.options import Positional
from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from rackrun.convert.doctor.checks import LABEL, LEAK, NEAR_COPY, NEAR_LEAK, Finding, copied
from rackrun.convert.doctor.command import Doctor, examined
from rackrun.convert.doctor.fingerprints import FINGERPRINT, Fingerprints, fingerprint
from rackrun.convert.doctor.near_copies import NearPair, Prints, near_pairs
from rackrun.convert.folder import FolderOfClasses
from rackrun.convert.options import Packing
from rackrun.shards.open import open_source
from rackrun.training.judge.labels import suspects
from tests.lab.digits import TRAINED_ON, digits

ROOT = Path(__file__).parents[1]
TILE = 240  # pixels
PHOTOGRAPHS = (
    *("astronaut.png", "brick.png", "camera.png", "cell.png", "chelsea.png", "clock_motion.png"),
    *("coffee.png", "coins.png", "grass.png", "gravel.png", "hubble_deep_field.jpg", "ihc.png"),
    *("moon.png", "motorcycle_left.png", "page.png", "retina.jpg", "rocket.jpg", "text.png"),
)
"""Of scikit-image: those that are no drawings, and one of the stereo pair."""


@dataclass(frozen=True)
class Settings:
    """Measure the doctor."""

    what: Positional[Literal["digits", "messy", "photographs", "exact", "cost"]]
    """What to measure; messy: write the messy folder of the first seed to --out."""
    out: Path = Path("messy")
    """messy: folder to write."""
    seeds: tuple[int, ...] = (0,)
    """digits: a messy set for each."""
    epochs: int = 10
    """digits: epochs of the model."""
    images: int = 100_000
    """exact, cost: images."""


def main(args: Sequence[str]) -> None:
    """Print the measurement."""
    settings = parse(Settings, "python -m bench.doctor", args)
    if settings.what == "messy":
        write_messy(settings.out, settings.seeds[0])
        return
    with tempfile.TemporaryDirectory() as name:
        if settings.what == "digits":
            for seed in settings.seeds:
                messy_digits(Path(name) / str(seed), seed, settings.epochs)
        elif settings.what == "photographs":
            photographs()
        elif settings.what == "exact":
            exact(Path(name), settings.images)
        else:
            cost(Path(name), settings.images)


def decoded(data: bytes) -> Image.Image:
    """Return a JPEG, decoded."""
    return Image.open(io.BytesIO(data)).convert("RGB")


def scaled(image: Image.Image, share: float) -> Image.Image:
    """Return an image of other size."""
    size = [max(1, round(side * share)) for side in image.size]
    return image.resize((size[0], size[1]), Image.Resampling.BICUBIC)


def cropped(image: Image.Image, share: float, at: tuple[float, float] = (0.5, 0.5)) -> Image.Image:
    """Return an image without this share of its width and height."""
    width, height = (round(side * (1 - share)) for side in image.size)
    left, top = round((image.width - width) * at[0]), round((image.height - height) * at[1])
    return image.crop((left, top, left + width, top + height))


def tinted(image: Image.Image, *factors: float) -> Image.Image:
    """Return an image whose channels are multiplied."""
    pixels = np.asarray(image.convert("RGB")) * np.array(factors)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


Change = Callable[[Image.Image], Image.Image]

CHANGES: dict[str, Change] = {
    "JPEG, quality 75": lambda image: decoded(jpeg(image, 75)),
    "JPEG, quality 30": lambda image: decoded(jpeg(image, 30)),
    "JPEG, quality 10": lambda image: decoded(jpeg(image, 10)),
    "scaled to a half": lambda image: scaled(image, 0.5),
    "scaled to a quarter": lambda image: scaled(image, 0.25),
    "squeezed to 224 x 224": lambda image: image.resize((224, 224)),
    "cropped by 2 %": lambda image: cropped(image, 0.02, (0.3, 0.7)),
    "cropped by 5 %": lambda image: cropped(image, 0.05, (0.3, 0.7)),
    "cropped by 10 %, centre": lambda image: cropped(image, 0.1),
    "cropped by 10 %, corner": lambda image: cropped(image, 0.1, (0, 1)),
    "cropped by 20 %, centre": lambda image: cropped(image, 0.2),
    "mirrored": ImageOps.mirror,
    "turned by 90°": lambda image: image.transpose(Image.Transpose.ROTATE_90),
    "warmer": lambda image: tinted(image, 1.15, 1.0, 0.8),
    "brighter": lambda image: tinted(image, 1.3, 1.3, 1.3),
    "darker": lambda image: tinted(image, 0.6, 0.6, 0.6),
    "gray": lambda image: image.convert("L").convert("RGB"),
    "cropped by 4 %, half, quality 60": lambda image: decoded(
        jpeg(scaled(cropped(image, 0.04, (0.2, 0.9)), 0.5), 60)
    ),
    "mirrored, tinted, scaled, quality 60": lambda image: ImageOps.mirror(
        decoded(jpeg(tinted(scaled(image, 0.4), 1.1, 1.0, 0.9), 60))
    ),
}

OF_DIGITS: list[Change] = [
    CHANGES["JPEG, quality 75"],
    lambda image: scaled(image, 0.75),
    lambda image: cropped(image, 1 / 28, (0, 1)),
    CHANGES["mirrored"],
    CHANGES["darker"],
]
"""What near copies among the digits are made by, in turn."""


def real_photographs() -> Iterator[Image.Image]:
    """Yield photographs of installed packages."""
    from sklearn.datasets import load_sample_images

    yield from map(Image.fromarray, load_sample_images().images)
    if find_spec("skimage"):
        folder = resources.files("skimage") / "data"
        for name in PHOTOGRAPHS:
            with contextlib.suppress(FileNotFoundError), (folder / name).open("rb") as file:
                yield Image.open(file).convert("RGB")


def tiles(image: Image.Image) -> Iterator[Image.Image]:
    """Yield an image, and what it is tiled into."""
    yield image
    for left in range(0, image.width - TILE + 1, TILE):
        for top in range(0, image.height - TILE + 1, TILE):
            yield image.crop((left, top, left + TILE, top + TILE))


def faces() -> Iterator[Image.Image]:
    """Yield faces of Labeled Faces in the Wild, 25 x 25 pixels, as scikit-image has them."""
    if find_spec("skimage"):
        with (resources.files("skimage") / "data" / "lfw_subset.npy").open("rb") as file:
            pixels = np.load(file)[:100]
        yield from (
            Image.fromarray((255 * face).astype(np.uint8)).convert("RGB") for face in pixels
        )


def photographs() -> None:
    """Print recall by kind of change, and the false ones among the images as they were."""
    photos = list(real_photographs())
    pictures = [tile for photo in photos for tile in tiles(photo)]
    alike = {
        f"{len(pictures)} photographs and tiles of {len(photos)}": pictures,
        "400 digits": [Image.fromarray(pixels).convert("RGB") for pixels in digits()[0][:400]],
        "100 faces": list(faces()),
    }
    for title, images in alike.items():
        if images:
            _recall(title, images)


def _recall(title: str, images: list[Image.Image]) -> None:
    originals = np.stack([fingerprint(_png(image)) for image in images])
    alone = _pairs(originals)
    print(f"{title}: {len(alone)} pairs among them as they are", flush=True)
    for name, change in CHANGES.items():
        changed = np.stack([fingerprint(_png(change(image))) for image in images])
        pairs = _pairs(np.concatenate([originals, changed]))
        count = len(images)
        detected = sum(pair.second - pair.first == count for pair in pairs)
        false = sum((pair.second - pair.first) % count != 0 for pair in pairs)
        print(f"  {name:38} {detected / count:7.1%} found, {false} other pairs", flush=True)


def _pairs(fingerprints: np.ndarray) -> list[NearPair]:
    with contextlib.redirect_stderr(io.StringIO()):
        return near_pairs(Prints.of(fingerprints), 1)


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def messy_digits(folder: Path, seed: int, epochs: int) -> None:
    """Print recall and precision for one messy set."""
    wrong, origins = write_messy(folder / "raw", seed)
    data = folder / "shards"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        FolderOfClasses(folder / "raw", data, packing=Packing(allow=("leaks",), workers=1)).run()
    runs = folder / "runs"
    command = [sys.executable, "-m", "rackrun", "local", "--runs", str(runs), "mnist"]
    command += ["--data", str(data), "--eval-split", "val", "--epochs", str(epochs)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    started = time.process_time()
    with contextlib.redirect_stderr(io.StringIO()):
        fingerprints, findings = examined(Doctor(str(data), runs / "latest"), suspects)
    seconds = time.process_time() - started
    leaked = {stem for stem in origins if stem.startswith("leak")}
    near = {stem for stem in origins if stem.startswith("near")}
    stems = defaultdict[str, list[tuple[str, str]]](list)
    for each in findings:
        stems[each.problem].append(_stems(fingerprints, each))
    labels = {stem for stem, _ in stems[LABEL]}
    pairs = stems[NEAR_COPY] + stems[NEAR_LEAK]
    right = [set(pair) & near for pair in pairs if _same(origins, *pair)]
    found_leaks = leaked & {stem for stem, _ in stems[LEAK]}
    print(f"seed {seed}: {seconds:.0f} s of CPU")
    print(f"  labels       {_shares(len(labels & wrong), len(wrong), len(labels))}")
    print(f"  near copies  {_shares(len(set().union(*right)), len(near), len(pairs), len(right))}")
    print(f"  leaks        {len(found_leaks)} of {len(leaked)}", flush=True)


def _shares(detected: int, planted: int, named: int, right: int | None = None) -> str:
    right = detected if right is None else right
    return (
        f"recall {detected / planted:.3f} ({detected} of {planted}), precision"
        f" {right / max(1, named):.3f} ({right} of {named})"
    )


def _stems(fingerprints: Fingerprints, finding: Finding) -> tuple[str, str]:
    """Return the keys of a finding's images."""
    first, second = (
        fingerprints.named(position).key.partition("_")[2] if position else ""
        for position in (finding.position, finding.other)
    )
    return first, second


def _same(origins: dict[str, str], first: str, second: str) -> bool:
    """Return whether two images were made of one."""
    return origins.get(first, first) == origins.get(second, second)


def write_messy(
    folder: Path, seed: int, wrong_share: float = 0.05
) -> tuple[set[str], dict[str, str]]:
    """Write a messy folder of digits; return stems of wrong labels, and copies by their origins."""
    random = np.random.default_rng(seed)
    images, true = digits()
    labels = true.astype(int)
    flipped = random.choice(len(labels), round(wrong_share * len(labels)), replace=False)
    labels[flipped] = (labels[flipped] + random.integers(1, 10, len(flipped))) % 10
    wrong, origins = set[str](), dict[str, str]()

    def write(split: str, stem: str, number: int, data: bytes) -> None:
        path = folder / split / str(labels[number]) / f"{stem}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        if labels[number] != true[number]:
            wrong.add(stem)

    for number, pixels in enumerate(images):
        split = "train" if number < TRAINED_ON else "val"
        write(split, f"digit{number}", number, jpeg(Image.fromarray(pixels)))
    copied_ones = random.choice(TRAINED_ON, round(0.03 * len(labels)), replace=False)
    for turn, number in enumerate(copied_ones):
        changed = OF_DIGITS[turn % len(OF_DIGITS)](Image.fromarray(images[number]).convert("RGB"))
        write("train", f"near{number}", number, jpeg(changed, 85))
        origins[f"near{number}"] = f"digit{number}"
    for number in TRAINED_ON + random.choice(len(labels) - TRAINED_ON, 20, replace=False):
        write("train", f"leak{number}", number, jpeg(Image.fromarray(images[number])))
        origins[f"leak{number}"] = f"digit{number}"
    return wrong, origins


def exact(folder: Path, count: int) -> None:
    """Print the CPU that exact copies take, of images a hundredth of which are copies."""
    image = jpeg(Image.fromarray(digits()[0][0]))
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for number in range(count):
            # Number 7 of every hundred is a copy of number 6.
            data = commented(image, f"{number - (number % 100 == 7):09d}")
            archive.writestr(f"train/{number % 100 // 10}/{number}.jpg", data)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        FolderOfClasses(
            folder / "images.zip", folder / "shards", packing=Packing(val_percent=0)
        ).run()
    started = time.process_time()
    source = open_source(str(folder / "shards"))
    rows = {split.name: np.arange(split.samples) for split in source.manifest.splits}
    findings = list(copied(source, rows))
    seconds = time.process_time() - started
    print(f"{count:,} images: {len(findings):,} exact copies in {seconds:.2f} s of CPU")


def cost(folder: Path, count: int) -> None:
    """Print the CPU of reading, decoding and hashing photographs, and of comparing 100,000."""
    photos = [tile for photo in real_photographs() for tile in tiles(photo)]
    jpegs = [jpeg(photo.resize((500, 375))) for photo in photos[:64]]
    started = time.process_time()
    for number in range(count):
        fingerprint(jpegs[number % len(jpegs)])
    seconds = time.process_time() - started
    print(f"JPEGs of 500 x 375 pixels: {1e3 * seconds / count:.2f} ms of CPU each to look at")
    random = np.random.default_rng(0)
    fingerprints = np.zeros(20_000, FINGERPRINT)
    for name in ("hash", "mirrored"):
        fingerprints[name] = random.integers(2**64, size=(len(fingerprints), 4), dtype=np.uint64)
    fingerprints["thumb"] = random.integers(256, size=(len(fingerprints), 16, 16), dtype=np.uint8)
    started = sum(os.times()[:4])
    near_pairs(Prints.of(fingerprints), 1)
    pairs = len(fingerprints) * (len(fingerprints) + 1) / 2
    seconds = sum(os.times()[:4]) - started
    print(
        f"{len(fingerprints):,} unrelated images compared: {seconds:.1f} s of CPU,"
        f" {1e9 * seconds / pairs:.1f} ns a pair: {5e9 * seconds / pairs:.0f} s for 100,000"
    )


if __name__ == "__main__":
    run(main)
