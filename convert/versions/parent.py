"""The newest version of a shard folder, as that from which the next one is made."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

from rackrun.convert.images.resize import Preset
from rackrun.convert.packing.output_folder import Target
from rackrun.convert.packing.plan import TEST, TRAIN, VAL, ShardPlan, Start, load_plan
from rackrun.convert.packing.stored_samples import ShardKeys, StoredShard, keys_of, shards_of
from rackrun.errors import UsageError
from rackrun.shard_folder import folder_and_version, why_no_shards
from rackrun.shards.index import Manifest, shard_number
from rackrun.shards.open import open_source
from rackrun.shards.source import Source
from rackrun.terminal import say

URL = re.compile(r"https?:/")  # of which Path has made one slash


@dataclass(frozen=True)
class Parent:
    """The newest version of a locked folder."""

    target: Target
    source: Source

    @classmethod
    @contextlib.contextmanager
    def locked(cls, folder: str) -> Iterator["Parent"]:
        """Yield the newest version, while no other command changes the folder.

        UsageError if there is none, if an earlier one is named, or if the tars lie elsewhere.
        """
        location, version = folder_and_version(folder)
        if URL.match(location):
            raise UsageError(f"{location}: type this on the server, with the path of its folder")
        if reason := why_no_shards(location):
            raise UsageError(reason)
        target = Target(Path(location))
        with target.locked():
            parent = cls(target, open_source(location))
            if version not in (0, parent.manifest.number):
                raise UsageError(
                    f"{folder}: not the newest version, which is {parent.manifest.number}; only "
                    "that one can be changed; to go on from an earlier one, squash it"
                )
            if parent.manifest.tars:
                raise UsageError(
                    f"{location}: its tars lie on a server, and are changed only there: index them "
                    "in their own folder, and type this with it"
                )
            newest = parent.manifest.digest
            goes_on = target.plan.exists() and load_plan(target.plan).parent == newest
            if target.work.exists() and not goes_on:
                target.give_up()  # it was killed when all but tidying up was done
            yield parent

    @property
    def manifest(self) -> Manifest:
        """The manifest of the newest version."""
        return self.source.manifest

    @property
    def preset(self) -> Preset:
        """Size and quality of its images."""
        return Preset.of(self.manifest)

    @cached_property
    def versions(self) -> list[Manifest]:
        """The manifests of all versions that are here, the newest first."""
        return list(self.target.versions())

    def starts(self, replaced: Mapping[str, int] | None = None) -> dict[str, Start]:
        """Return where the new shards of each split begin.

        `replaced`: by split, how many of its shards are written anew. A number that any version
        has used is never used again, nor one that a tar of another program has in its name.
        """
        used = {split: 0 for split in (TRAIN, VAL, TEST)}
        names = set[str]().union(*(manifest.files() for manifest in self.versions))
        names |= {path.name for path in self.target.folder.glob("*.tar")} - self.target.written()
        for split, name in product(used, names):
            used[split] = max(used[split], 1 + shard_number(name, self.manifest.dataset, split))
        counts = {split.name: len(split.shards) for split in self.manifest.splits}
        fixed = replaced or {}
        return {
            split: Start(counts.get(split, 0) - fixed.get(split, 0), number, fixed.get(split, 0))
            for split, number in used.items()
        }

    def planned(self, plan: ShardPlan) -> ShardPlan:
        """Return the plan as one of the next version."""
        before = self.manifest
        return replace(
            plan,
            version=before.number + 1,
            parent=before.digest,
            adopted=before.adopted,
            origins=tuple(dict.fromkeys((*before.sources, *plan.origins))),
        )

    def say_added(self, plan: ShardPlan) -> None:
        """Print that the version of a plan is there, and its new classes."""
        new = plan.classes[len(self.manifest.classes) :]
        more = f"; new classes: {', '.join(new)}" if new else ""
        say(f"{self.target.folder}: version {plan.version} is the newest one{more}")

    def stored(self) -> Iterator[tuple[StoredShard, bool]]:
        """Yield every shard of every version once, and whether the newest one has it."""
        names = set[str]()
        for manifest in self.versions:
            is_newest = manifest is self.versions[0]
            location = f"{self.target.folder}@{manifest.number}"
            for stored in shards_of(self.source if is_newest else open_source(location)):
                if stored.shard.name not in names:
                    names.add(stored.shard.name)
                    yield stored, is_newest

    def keys(self, workers: int) -> ShardKeys:
        """Return the keys of the newest version, by shard."""
        return keys_of(shards_of(self.source), workers)
