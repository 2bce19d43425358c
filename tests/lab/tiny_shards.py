"""Small shard folders made by the real writer."""

import random
import zlib
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from rackrun.shards.index import (
    Manifest,
    Row,
    Split,
    index_name,
    pack_rows,
    serialise_index,
    shard_name,
)
from rackrun.shards.samples import Sample, samples
from rackrun.shards.source import Source
from rackrun.shards.writer import write_shard


@dataclass(frozen=True)
class Tiny:
    """A shard folder, and what is in it."""

    folder: Path
    samples: list[list[Sample]]  # by shard

    @property
    def all(self) -> list[Sample]:
        """Return every sample, in the order of the shards."""
        return [sample for shard in self.samples for sample in shard]


def everything(source: Source, split: str = "train") -> list[Sample]:
    """Return every sample of a split, verified, in the order of the shards."""
    shards = source.manifest.split(split).shards
    return [sample for number in range(len(shards)) for sample in samples(source, split, number)]


def write_tiny(
    folder: Path, shards: int = 3, samples: int = 10, size: int = 2000, seed: int = 0
) -> Tiny:
    """Write a folder of random "images" of about this many bytes, readable by everyone."""
    dice = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    made, entries, rows = [], [], []
    for number in range(shards):
        name = shard_name("tiny", "train", number)
        inside = [_sample(dice, f"s{number}_{location}", size) for location in range(samples)]
        with write_shard(folder / name) as writer:
            for sample in inside:
                position = writer.add(sample.key, sample.label, sample.image)
                rows.append(_row(number, position, sample))
            entries.append(writer.close())
        made.append(inside)
    index = serialise_index(pack_rows(rows))
    (folder / index_name("tiny", "train")).write_bytes(index)
    part = Split(
        "train", len(rows), index_name("tiny", "train"), sha256(index).hexdigest(), tuple(entries)
    )
    (folder / "dataset.json").write_bytes(Manifest("tiny", ("cat", "dog"), (part,)).serialise())
    return Tiny(folder, made)


def _sample(dice: random.Random, key: str, size: int) -> Sample:
    length = dice.randrange(size // 2, size * 3 // 2)
    return Sample(key, dice.randbytes(length), "jpg", dice.randrange(2))


def _row(number: int, position: tuple[int, int, int], sample: Sample) -> Row:
    offset, length, image_offset = position
    crc = zlib.crc32(sample.image)
    size = len(sample.image)
    return Row(number, offset, length, image_offset, size, sample.label, 8, 8, crc, b"jpg")
