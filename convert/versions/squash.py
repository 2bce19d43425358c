"""A version of a shard folder as a folder of its own, without a history."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from rackrun.commandline.options import Examples, Positional
from rackrun.convert.images.resize import Preset
from rackrun.convert.options import Packing
from rackrun.convert.packing.pack import pack
from rackrun.convert.packing.stored_samples import StoredSamples, keys_of, shards_of
from rackrun.convert.readers.records import RecordListing
from rackrun.errors import UsageError
from rackrun.shard_folder import folder_and_version
from rackrun.shards.open import open_source


@dataclass(frozen=True)
class Squash:
    """Copy the samples of one version into a new folder, mixed and cut as a conversion does."""

    examples: ClassVar[Examples] = (
        ("{prog} data/shards data/squashed", "the newest version"),
        ("{prog} data/shards@2 data/second", "version 2"),
    )

    location: Positional[str]
    """Shard folder, or the http(s):// URL of one."""
    out: Positional[Path]
    """Folder for the new shards; made if it is missing."""
    shards: int = 0
    """Number of training shards; 0: about 64 MiB each, as those of other splits always are, and at
    least 16 if there are enough images."""
    workers: int = 0
    """Number of processes; 0: one per core."""
    force: bool = False
    """Replace the output of an earlier conversion in OUT."""

    def run(self) -> None:
        """Copy; what is interrupted goes on with the same command."""
        source = open_source(self.location)
        manifest, samples = source.manifest, StoredSamples(source)
        folder = Path(folder_and_version(self.location)[0])
        if folder.is_dir() and self.out.resolve().is_relative_to(folder.resolve()):
            raise UsageError(f"{self.out}: lies inside {folder}; choose a folder outside it")
        packing = Packing(
            preset=Preset.of(manifest),
            shards=self.shards,
            val_percent=0.0,
            exif="apply" if manifest.upright else "ignore",
            seed=manifest.seed,
            allow=("similar-classes",),
            workers=self.workers,
            force=self.force,
        )
        records = samples.records(keys_of(shards_of(source), packing.processes), {})
        listing = RecordListing(
            manifest.dataset, manifest.classes, (samples,), records, copied=True
        )
        origins, adopted = manifest.sources, manifest.adopted
        pack(listing, packing, self.out, partial(replace, origins=origins, adopted=adopted))
