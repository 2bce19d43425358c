"""A version of a shard folder as a plain new folder: its images converted once more.

Samples that were dropped are really gone, the .cls of each sample is its class in the index, and
the shards are mixed and cut as a conversion does. Images keep their bytes unless a smaller size is
asked for. Other members of tars from other programs are not copied.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from rackrun.commandline.options import Examples, Positional
from rackrun.convert.options import Packing
from rackrun.convert.packing.pack import pack
from rackrun.convert.packing.stored_samples import shards_of
from rackrun.convert.readers.names import free_key
from rackrun.convert.readers.records import Record, RecordListing
from rackrun.errors import UsageError
from rackrun.shard_folder import folder_and_version
from rackrun.shards.open import open_source
from rackrun.shards.resize import Resize
from rackrun.shards.samples import sample_in_row
from rackrun.shards.source import Source
from rackrun.terminal import say

OF_RAW_DATA = ("val_percent", "test_percent", "exif")
"""Options of conversions that have no meaning for shards."""


@dataclass(frozen=True)
class Shards:
    """Write a version of a shard folder as a plain new folder, without what was dropped."""

    examples: ClassVar[Examples] = (
        ("{prog} data/shards data/plain", "the newest version"),
        ("{prog} data/shards@2 data/second", "version 2"),
        ("{prog} data/shards data/small --short-side 256", "smaller images"),
    )

    location: Positional[str]
    """Shard folder, or the http(s):// URL of one; for one of its versions: DATA@2."""
    out: Positional[Path]
    """Folder for the new shards; created if it is missing."""
    packing: Packing = field(default_factory=Packing)

    def run(self) -> None:
        """Copy; an interrupted copy continues with the same command."""
        source = open_source(self.location)
        folder = Path(folder_and_version(self.location)[0])
        if folder.is_dir() and self.out.resolve().is_relative_to(folder.resolve()):
            raise UsageError(f"{self.out}: lies inside {folder}; choose a folder outside it")
        manifest = source.manifest
        stored = replace(manifest, preset=asdict(Resize.of(manifest)))
        if manifest.adopted:
            say(f"{self.location}: members other than images and classes are not copied")
        listing = RecordListing(
            manifest.dataset,
            manifest.classes,
            (_StoredImages(source),),
            _records(source),
            stored=stored,
        )
        for name in OF_RAW_DATA:
            if getattr(self.packing, name) != getattr(Packing, name):
                option = name.replace("_", "-")
                raise UsageError(f"--{option}: splits and orientation are kept; leave it out")
        # Images were turned upright, or left as they are, when they were first converted.
        allow = (*self.packing.allow, "similar-classes")
        packing = replace(self.packing, val_percent=0.0, exif="ignore", allow=allow)
        pack(listing, packing, self.out)


def _records(source: Source) -> Iterator[Record]:
    """Yield the samples of all splits; the offset of a record is the number of its row."""
    taken, rows = set[str](), Counter[str]()  # so far, by split
    for stored in shards_of(source):
        for key, row in zip(stored.sample_keys(), stored.rows, strict=True):
            name, length = f"{stored.shard.name}/{key}", int(row["image_length"])
            place = 0, rows[stored.split], length, length
            rows[stored.split] += 1
            yield Record(
                free_key((key,), name, taken), int(row["label"]), stored.split, name, *place
            )


class _StoredImages:
    """The images of a version as a container."""

    def __init__(self, source: Source) -> None:
        self._source, self.name = source, source.manifest.dataset

    def read(self, record: Record, start: int = 0) -> bytes:
        """Return an image; DataError if it is damaged: the new folder would lack it in silence."""
        return sample_in_row(self._source, record.split, record.offset).image[start:]
