"""The next version of a finished folder: other rows, a new manifest, and no tar written again.

    dataset.json -> indexes NAME.vN.index.npy -> dataset.vM.json, the old manifest -> dataset.json

Until the last step, which is one rename, the folder is as it was. An index that was written for a
version that never came is overwritten or removed by the next one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from rackrun.atomic import partials, write_whole, written_for
from rackrun.commands import called
from rackrun.contract.files import MANIFEST_NAME
from rackrun.convert.options import Packing
from rackrun.convert.packing.copies import SplitRows, copies, leaks_refused, local_files
from rackrun.convert.packing.finalize import write_split
from rackrun.convert.packing.output_folder import Target
from rackrun.convert.packing.plan import TEST, TRAIN, VAL
from rackrun.convert.packing.quality_report import report_lines
from rackrun.convert.packing.stored_samples import StoredShard, shards_of
from rackrun.convert.readers.records import ImageDefect
from rackrun.errors import DataError, UsageError
from rackrun.shard_folder import folder_and_version, why_no_shards
from rackrun.shards.index import (
    LONGEST_COMMAND,
    Manifest,
    Shard,
    Split,
    index_name,
    manifest_name,
    shard_number,
)
from rackrun.shards.open import open_source, sources_of
from rackrun.shards.source import Source
from rackrun.terminal import say

if TYPE_CHECKING:
    import numpy as np

SPLIT_NAMES = (TRAIN, VAL, TEST)
URL = re.compile(r"https?:/")  # of which Path has made one slash


@dataclass(frozen=True)
class SplitChange:
    """The rows that a split has from now on; their shard numbers count in `shards`."""

    shards: Sequence[Shard]
    rows: np.ndarray


@dataclass(frozen=True)
class NewestVersion:
    """The newest version of a locked folder, from which the next one is made."""

    target: Target
    source: Source

    @classmethod
    @contextmanager
    def locked(cls, folder: str) -> Iterator[NewestVersion]:
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
            newest = cls(target, open_source(location))
            manifest = newest.manifest
            if version not in (0, manifest.number):
                raise UsageError(
                    f"{folder}: not the newest version, which is {manifest.number}; only that one"
                    f" can be changed; to go on from an earlier one, type: {called('convert')}"
                    f" shards {shlex.quote(folder)} OUT"
                )
            if manifest.tars:
                raise UsageError(
                    f"{location}: its tars lie on a server, and are changed only there: index them "
                    "in their own folder, and type this with it"
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

    def earlier_shards(self) -> Iterator[StoredShard]:
        """Yield each shard of earlier versions, as it was when it had the most samples."""
        names = set[str]()
        for source in reversed(self.earlier):
            for stored in shards_of(source):
                if stored.shard.name not in names:
                    names.add(stored.shard.name)
                    yield stored

    def shards_in(self, split: str) -> tuple[Shard, ...]:
        """Return the shards of a split; none if there is no such split."""
        return next((each.shards for each in self.manifest.splits if each.name == split), ())

    def free_numbers(self) -> dict[str, int]:
        """Return, by split, the first number in the name of a tar that no version has used."""
        names = set[str]().union(*(each.files() for each in self._manifests()))
        dataset = self.manifest.dataset
        return {
            split: 1 + max((shard_number(name, dataset, split) for name in names), default=-1)
            for split in SPLIT_NAMES
        }

    def split_changes(self) -> dict[str, SplitChange]:
        """Return all splits as they are, with rows that may be changed."""
        return {
            split.name: SplitChange(split.shards, self.source.index(split.name).copy())
            for split in self.manifest.splits
        }

    def joined(self, added: Mapping[str, SplitChange]) -> dict[str, SplitChange]:
        """Return all splits, with the shards that are added to each behind those that it has."""
        import numpy as np

        changes = self.split_changes()
        for name, more in added.items():
            before = changes.get(name, SplitChange((), more.rows[:0]))
            rows = more.rows.copy()
            rows["shard"] += len(before.shards)
            shards = (*before.shards, *more.shards)
            changes[name] = SplitChange(shards, np.concatenate([before.rows, rows]))
        return dict(sorted(changes.items()))

    def refuse_leaks(
        self,
        changes: Mapping[str, SplitChange],
        classes: Sequence[str],
        packing: Packing,
        moves: Mapping[str, Path] = MappingProxyType({}),
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> list[ImageDefect]:
        """Print and return the exact copies among new images and old ones; DataError for a leak.

        `moves`: where tars lie that are not in the folder yet. `names`: of new images by key, as
        their source has them.
        """
        folder = self.target.folder

        def path_of(name: str) -> Path:
            return moves[name] if name in moves and moves[name].exists() else folder / name

        splits = [SplitRows(name, change.shards, change.rows) for name, change in changes.items()]
        new_from = {name: len(self.shards_in(name)) for name in changes}
        found = copies(splits, classes, local_files(path_of), new_from=new_from)
        findings = [
            finding._replace(
                name=_in_source(finding.name, moves, names),
                detail=_in_source(finding.detail, moves, names),
            )
            for finding in found
        ]
        if "leaks" not in packing.allow and (leaks := leaks_refused(findings)):
            raise DataError(
                f"{folder}: {leaks}; take them out of the source and add --force, or add --allow"
                " leaks"
            )
        for line in report_lines(findings):
            say(line.strip())
        return findings

    def say_added(self, version: Manifest) -> None:
        """Print that a version is there, and its new classes."""
        new = version.classes[len(self.manifest.classes) :]
        more = f"; new classes: {', '.join(new)}" if new else ""
        say(f"{self.target.folder}: version {version.number} is the newest one{more}")

    def _manifests(self) -> list[Manifest]:
        return [self.manifest, *(source.manifest for source in self.earlier)]

    def publish(
        self,
        changes: Mapping[str, SplitChange],
        change: Mapping[str, int],
        command: Sequence[str],
        **fields: object,
    ) -> Manifest:
        """Make these splits the next version, which is there whole or not at all.

        `change`: how many samples were added, dropped or relabelled; `command`: what was typed;
        `fields`: others of the manifest, such as new classes.
        """
        before, folder = self.manifest, self.target.folder
        number = before.number + 1
        self._remove_unfinished(number)
        splits = [self._split(name, changes[name], number) for name in sorted(changes)]
        manifest = replace(
            before,
            splits=tuple(split for split in splits if split.samples),
            parents=(*before.parents, before.digest),
            change=dict(change),
            made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            command=f"{called('convert')} {shlex.join(command)}"[:LONGEST_COMMAND],
            **fields,  # type: ignore[arg-type]  # by name, from two callers
        )
        if not manifest.splits:
            raise UsageError(f"{folder}: no sample would be left; remove the folder instead")
        write_whole(folder / manifest_name(before.number), self.target.manifest.read_bytes())
        write_whole(self.target.manifest, manifest.serialise())
        return manifest

    def _split(self, name: str, change: SplitChange, version: int) -> Split:
        """Write the index of a split, unless it stays as it is; shards without samples go."""
        import numpy as np

        counts = np.bincount(change.rows["shard"], minlength=len(change.shards))
        shards = tuple(
            replace(shard, samples=int(count))
            for shard, count in zip(change.shards, counts, strict=True)
            if count
        )
        rows = change.rows.copy()
        rows["shard"] = (np.cumsum(counts > 0) - 1)[rows["shard"]]
        for split in self.manifest.splits:
            if split.name == name and np.array_equal(rows, self.source.index(name)):
                return split
        if not shards:
            return Split(name, 0, "", "", ())
        dataset = self.manifest.dataset
        return write_split(self.target.folder, dataset, name, rows.tobytes(), shards, version)

    def _remove_unfinished(self, version: int) -> None:
        """Remove what was written for a version that never came, whole or in part."""
        folder, dataset = self.target.folder, self.manifest.dataset
        indexes = {index_name(dataset, split, version) for split in SPLIT_NAMES}
        for name in indexes:
            (folder / name).unlink(missing_ok=True)
        for path in partials(folder):
            if written_for(path) in {*indexes, manifest_name(version - 1), MANIFEST_NAME}:
                path.unlink(missing_ok=True)


def _in_source(text: str, tars: Mapping[str, Path], names: Mapping[str, str]) -> str:
    """Return the text with new images as their source names them, `train/dog/1.jpg`."""

    def named(stored: re.Match[str]) -> str:
        return names.get(stored[2], stored[0]) if stored[1] in tars else stored[0]

    return re.sub(r"(\S+\.tar)/(\S+)", named, text)
