"""The next version of a finished folder: other rows, a new manifest, and no tar written again.

    dataset.json -> indexes NAME.vN.index.npy -> dataset.vM.json, the old manifest -> dataset.json

Until the last step, which is one rename, the folder is as it was. An index that was written for a
version that never came is overwritten or removed by the next one.
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import numpy as np

from rackrun.atomic import write_whole
from rackrun.commands import called
from rackrun.contract.files import MANIFEST_NAME
from rackrun.convert.packing.copies import SplitRows
from rackrun.convert.packing.finalize import counted, write_split
from rackrun.convert.packing.output_folder import Target
from rackrun.convert.packing.stored_samples import StoredShard, shards_of
from rackrun.convert.readers.records import TEST, TRAIN, VAL, ImageDefect
from rackrun.errors import UsageError
from rackrun.shard_folder import folder_and_version, why_no_shards
from rackrun.shards.index import (
    LONGEST_COMMAND,
    Manifest,
    Split,
    index_name,
    manifest_name,
    shard_number,
)
from rackrun.shards.open import open_source, sources_of
from rackrun.shards.source import Source
from rackrun.terminal import say

SPLIT_NAMES = (TRAIN, VAL, TEST)
URL = re.compile(r"https?:/")  # of which Path has made one slash


@dataclass(frozen=True)
class NewestVersion:
    """The newest version of a locked folder, from which the next one is made."""

    target: Target
    source: Source

    @classmethod
    @contextmanager
    def locked(cls, folder: str) -> Iterator["NewestVersion"]:
        """Yield the newest version, while no other command changes the folder.

        UsageError if there is none, if an earlier one is named, or if the tars lie elsewhere.
        """
        location, version = folder_and_version(folder)
        if URL.match(location):
            raise UsageError(
                f"{location}: type this command on the server, with the path of the folder"
            )
        if reason := why_no_shards(location):
            raise UsageError(reason)
        target = Target(Path(location))
        with target.locked():
            newest = cls(target, open_source(location))
            manifest = newest.manifest
            if version not in (0, manifest.number):
                raise UsageError(
                    f"{folder}: not the newest version, which is {manifest.number}; only that one"
                    f" can be changed; to go on from an earlier one, type: {called('convert')}"
                    f" shards {shlex.quote(folder)} OUT"
                )
            yield newest

    @property
    def manifest(self) -> Manifest:
        """Its manifest."""
        return self.source.manifest

    @cached_property
    def earlier(self) -> list[Source]:
        """The versions before it that are here, the newest first."""
        return list(sources_of(str(self.target.folder)))[1:]

    def earlier_shards(self) -> list[StoredShard]:
        """Return each shard of earlier versions, as it was when it had the most samples."""
        shards = dict[str, StoredShard]()
        for source in reversed(self.earlier):
            for stored in shards_of(source):
                shards.setdefault(stored.shard.name, stored)
        return [*shards.values()]

    def free_numbers(self) -> dict[str, int]:
        """Return, by split, the first number in the name of a tar that no version has used."""
        manifests = [self.manifest, *(source.manifest for source in self.earlier)]
        names = set[str]().union(*(each.files() for each in manifests))
        dataset = self.manifest.dataset
        return {
            split: 1 + max((shard_number(name, dataset, split) for name in names), default=-1)
            for split in SPLIT_NAMES
        }

    def parts(self) -> list[SplitRows]:
        """Return all splits, with rows that may be changed."""
        return [
            SplitRows(split.name, split.shards, self.source.index(split.name).copy())
            for split in self.manifest.splits
        ]

    def publish(
        self,
        parts: Sequence[SplitRows],
        change: Mapping[str, int],
        command: Sequence[str],
        findings: Iterable[ImageDefect] = (),
        **fields: object,
    ) -> None:
        """Make these splits the next version, which is there whole or not at all.

        `change`: how many samples were added, dropped or relabeled; `command`: what was typed;
        `findings`: in new images; `fields`: others of the manifest, such as new classes.
        """
        before, folder = self.manifest, self.target.folder
        number = before.number + 1
        self._remove_unfinished(number)
        splits = [self._split(part, number) for part in parts]
        manifest = replace(
            before,
            splits=tuple(split for split in splits if split.samples),
            parents=(*before.parents, before.digest),
            change=dict(change),
            made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            command=f"{called('convert')} {shlex.join(command)}"[:LONGEST_COMMAND],
            report=dict(sorted((Counter(before.report) + Counter(counted(findings))).items())),
            **fields,  # type: ignore[arg-type]  # by name, from two callers
        )
        if not manifest.splits:
            raise UsageError(f"{folder}: no sample would be left; remove the folder instead")
        write_whole(folder / manifest_name(before.number), self.target.manifest.read_bytes())
        write_whole(self.target.manifest, manifest.serialize())
        new = manifest.classes[len(before.classes) :]
        more = f"; new classes: {', '.join(new)}" if new else ""
        say(f"{folder}: version {number} is the newest one{more}")

    def _split(self, part: SplitRows, version: int) -> Split:
        """Write the index of a split, unless it stays as it is; shards without samples go."""
        counts = np.bincount(part.rows["shard"], minlength=len(part.shards))
        shards = tuple(
            replace(shard, samples=int(count))
            for shard, count in zip(part.shards, counts, strict=True)
            if count
        )
        rows = part.rows.copy()
        rows["shard"] = (np.cumsum(counts > 0) - 1)[rows["shard"]]
        for split in self.manifest.splits:
            if split.name == part.split and np.array_equal(rows, self.source.index(split.name)):
                return split
        if not shards:
            return Split(part.split, 0, "", "", ())
        changed = SplitRows(part.split, shards, rows)
        return write_split(self.target.folder, self.manifest.dataset, changed, version)

    def _remove_unfinished(self, version: int) -> None:
        """Remove what was written for a version that never came, whole or in part."""
        folder, dataset = self.target.folder, self.manifest.dataset
        indexes = {index_name(dataset, split, version) for split in SPLIT_NAMES}
        for name in indexes:
            (folder / name).unlink(missing_ok=True)
        self.target.clear_partials({*indexes, manifest_name(version - 1), MANIFEST_NAME})
