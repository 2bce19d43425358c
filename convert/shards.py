"""A version of a shard folder as a plain new folder: its images converted once more.

Samples that were dropped are really gone, the .cls of each sample is its class in the index, and
the shards are mixed and cut as a conversion does. Images keep their bytes unless a smaller size is
asked for. Other members of tars from other programs are not copied.
"""

import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from rackrun.atomic import write_whole
from rackrun.commandline.options import Examples, Positional
from rackrun.contract.files import MANIFEST_NAME
from rackrun.convert.images.treatment import Preset
from rackrun.convert.options import Packing
from rackrun.convert.packing.pack import pack
from rackrun.convert.packing.stored_samples import shards_of
from rackrun.convert.readers.names import free_key
from rackrun.convert.readers.records import Record, RecordListing
from rackrun.errors import DataError, UsageError
from rackrun.shard_folder import folder_and_version
from rackrun.shards.folder import FolderSource
from rackrun.shards.index import Manifest, Origin
from rackrun.shards.open import open_source
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
        preset = Preset.of(manifest)  # or an error, before anything is written
        if manifest.adopted:
            say(f"{self.location}: members other than images and classes are not copied")
        listing = RecordListing(
            manifest.dataset, manifest.classes, (_StoredImages(source),), _records(source)
        )
        for name in OF_RAW_DATA:
            if getattr(self.packing, name) != getattr(Packing, name):
                option = name.replace("_", "-")
                raise UsageError(f"--{option}: splits and orientation are kept; leave it out")
        # Images were turned upright, or left as they are, when they were first converted.
        allow = (*self.packing.allow, "similar-classes")
        packing = replace(self.packing, val_percent=0.0, exif="ignore", allow=allow)
        pack(listing, packing, self.out)
        if packing.task_index is None:
            _describe(self.out, manifest, preset if packing.preset.passes_through else None)


def _records(source: Source) -> Iterator[Record]:
    taken = set[str]()
    for stored in shards_of(source):
        for key, row in zip(stored.sample_keys(), stored.rows, strict=True):
            name, length = f"{stored.shard.name}/{key}", int(row["image_length"])
            place = 0, int(row["image_offset"]), length, length
            yield Record(
                free_key((key,), name, taken), int(row["label"]), stored.split, name, *place,
                int(row["crc"]),
            )  # fmt: skip


class _StoredImages:
    """The images of a version as a container; a record's name begins with its shard's."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._shards = {stored.shard.name: stored.shard for stored in shards_of(source)}

    def origin(self) -> Origin:
        """Return the version as an entry of a manifest."""
        manifest = self._source.manifest
        return Origin(
            manifest.dataset, sum(s.bytes for s in self._shards.values()), manifest.digest
        )

    def read(self, record: Record) -> bytes:
        """Return an image; DataError if it is damaged: the new folder would lack it in silence."""
        shard = self._shards[record.name.partition(".tar/")[0] + ".tar"]
        for read in (self._source.read, self._source.reread):
            data = bytes(read(shard, record.offset, record.length))
            if zlib.crc32(data) == record.crc:
                return data
        raise DataError(f"{self._source.location}: {record.name}: its image is damaged")


def _describe(out: Path, before: Manifest, preset: Preset | None) -> None:
    """Write what earlier conversions did with the images into the new manifest, too."""
    manifest = FolderSource(str(out)).manifest
    described = replace(
        manifest,
        upright=before.upright,
        preset=asdict(preset) if preset else manifest.preset,
        sources=before.sources or manifest.sources,
    )
    if described != manifest:
        write_whole(out / MANIFEST_NAME, described.serialise())
