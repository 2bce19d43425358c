"""What every image looks like, in 350 bytes: a perceptual hash, 16 x 16 pixels, how plain it is.

All shards are read once, each image checked against its row of the index and decoded small.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from rackrun.convert.packing.stored_samples import StoredShard, shards_of
from rackrun.convert.packing.workers import ReportProgress, in_parallel, working_on
from rackrun.convert.progress import Progress
from rackrun.errors import DataError, Unavailable
from rackrun.shards.images import FORMATS, MAX_SCANS, UNDECODABLE, scans, too_large
from rackrun.shards.resize import in_mode
from rackrun.shards.samples import sample_of, stored_samples
from rackrun.shards.source import Source

SIDE = 64  # pixels of the gray square that is hashed
HASH_SIDE = 16  # of the hash: the lowest frequencies across and down
THUMB = 16  # pixels a side
PLAIN_LEVELS = 8  # from the median on: brightness that differs less is a plain surface

SOUND, WRONG_BYTES, UNDECODED = 0, 1, 2

FINGERPRINT = np.dtype(
    [
        ("state", "u1"),  # SOUND, WRONG_BYTES or UNDECODED
        ("plain", "<f4"),  # share of pixels with about the median brightness
        ("hash", "<u8", 4),  # perceptual hash, 256 bits
        ("mirrored", "<u8", 4),  # that of its mirror image
        ("thumb", "u1", (THUMB, THUMB)),  # gray
    ]
)

UNREADABLE = (*UNDECODABLE, Image.DecompressionBombError)
"""What Pillow raises at damaged images."""

HAS_HASHES = find_spec("imagehash") is not None
"""Whether the extra `doctor` is installed."""


class ImagePosition(NamedTuple):
    """Where an image is: its split, and its row in the split's index."""

    split: str
    row: int


class Named(NamedTuple):
    """The names of an image."""

    shard: str
    key: str


@dataclass(frozen=True)
class Fingerprints:
    """What the images of all splits look like, and what they are called."""

    source: Source
    by_split: dict[str, np.ndarray]
    keys: dict[str, list[str]]
    faults: list[str]
    """What is wrong with whole shards."""

    def named(self, position: ImagePosition) -> Named:
        """Return the names of an image."""
        split = self.source.manifest.split(position.split)
        shard = split.shards[int(self.source.index(position.split)["shard"][position.row])]
        return Named(shard.name, self.keys[position.split][position.row])

    def names(self, split: str) -> Iterator[Named]:
        """Yield the names of all images of a split, in the order of its index."""
        shards = self.source.manifest.split(split).shards
        numbers = self.source.index(split)["shard"].tolist()
        for number, key in zip(numbers, self.keys[split], strict=True):
            yield Named(shards[number].name, key)

    def label(self, position: ImagePosition) -> int:
        """Return the label of an image."""
        return int(self.source.index(position.split)["label"][position.row])


def fingerprints_of(source: Source, workers: int) -> Fingerprints:
    """Read and decode all images in `workers` processes; damaged ones are marked."""
    splits = source.manifest.splits
    for split in splits:
        source.index(split.name)  # read before the fork, so that all workers have it
    jobs, total = shards_of(source), sum(split.samples for split in splits)
    by_split = {split.name: [np.empty(0, FINGERPRINT)] for split in splits}
    keys: dict[str, list[str]] = {split.name: [] for split in splits}
    faults = list[str]()
    results = in_parallel(jobs, _fingerprint_shard, workers, "looked at", total)
    for job, (fingerprints, shard_keys, fault) in zip(jobs, results, strict=True):
        by_split[job.split].append(fingerprints)
        keys[job.split] += shard_keys
        faults += [fault] if fault else []
    joined = {split: np.concatenate(parts) for split, parts in by_split.items()}
    return Fingerprints(source, joined, keys, faults)


def _fingerprint_shard(
    stored: StoredShard, report: ReportProgress
) -> tuple[np.ndarray, list[str], str]:
    """Return the fingerprints of a shard, its keys, and what is wrong with the whole of it."""
    source, shard, fault = stored.source, stored.shard, ""
    fingerprints = np.zeros(shard.samples, FINGERPRINT)
    fingerprints["state"] = WRONG_BYTES  # until read: a broken shard hides the images after it
    keys = [""] * shard.samples
    number = -1
    try:
        for number, (row, data) in enumerate(stored_samples(source, stored.split, stored.number)):
            keys[number] = f"the sample at byte {row['offset']}"
            working_on(f"{stored.where}: {keys[number]}")
            report(Progress(1))
            try:
                sample = sample_of(source, shard, row, data)
            except Unavailable:
                raise
            except DataError:
                continue
            keys[number], fingerprints[number] = sample.key, fingerprint(sample.image)
    except Unavailable:
        raise
    except DataError as error:
        fault = str(error)
    report(Progress(shard.samples - number - 1))
    return fingerprints, keys, fault


def fingerprint(image: bytes) -> np.ndarray:
    """Return what an image looks like: one FINGERPRINT."""
    result = np.zeros((), FINGERPRINT)
    try:
        whole = opened(image, SIDE, "L")
        gray = in_mode(whole, "L").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    except UNREADABLE:
        result["state"] = UNDECODED
        return result
    pixels = np.asarray(gray, np.int16)
    result["plain"] = np.mean(np.abs(pixels - np.median(pixels)) <= PLAIN_LEVELS)
    result["thumb"] = np.asarray(gray.reduce(SIDE // THUMB))
    if HAS_HASHES:
        result["hash"], result["mirrored"] = bits(gray), bits(ImageOps.mirror(gray))
    return result


def opened(data: bytes, side: int, mode: str | None = None) -> Image.Image:
    """Return an image, a JPEG no larger than both sides need; raise one of UNREADABLE."""
    with warnings.catch_warnings(action="ignore"):
        image = Image.open(io.BytesIO(data), formats=tuple(FORMATS))
        if too_large(*image.size) or (image.format == "JPEG" and scans(data) > MAX_SCANS):
            raise ValueError("beyond the limits of what is read")
        image.draft(mode, (side, side))
        image.load()
        return image


def bits(gray: Image.Image) -> np.ndarray:
    """Return the perceptual hash of a gray square: the signs of its 256 lowest frequencies."""
    import imagehash

    phash = imagehash.phash(gray, hash_size=HASH_SIDE, highfreq_factor=SIDE // HASH_SIDE)
    packed: np.ndarray = np.packbits(phash.hash).view(np.uint64)
    return packed
