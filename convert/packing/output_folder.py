"""The output folder of a conversion: its paths, its lock, its earlier content.

OUT/cats-train-000000.tar …  appear one by one, each whole
OUT/.converting/plan         which conversion it is, and the files that it makes
OUT/.converting/*.done       the result of each shard: digest, findings, rows of the index
OUT/report.json              the quality report
OUT/*.index.npy, dataset.json  at the end: a folder with a manifest is complete

A later version adds tars, indexes, report.v2.json and, of the version before it, dataset.v1.json.
"""

import contextlib
import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from rackrun.atomic import partials, translated_os_errors, write_whole, written_for
from rackrun.contract.files import MANIFEST_NAME
from rackrun.convert.packing.plan import PlannedShard, ShardPlan
from rackrun.convert.readers.records import TEST, TRAIN, VAL, ImageDefect
from rackrun.errors import DataError, UsageError
from rackrun.shapes import Misshapen, Shape, matches, parsed, parsed_file
from rackrun.shards.folder import FolderSource
from rackrun.shards.host_folder import POLL_SECONDS, locked
from rackrun.shards.index import INDEX_FIELDS, Manifest, Sha256, Shard, index_name, manifest_name
from rackrun.shards.open import sources_of

REPORT_NAME = "report.json"
SHARD_FILE = r"-[a-z]+(-\d{6}\.tar|(\.v\d+)?\.index\.npy)"
OURS = re.compile(rf"[\w-]+{SHARD_FILE}|(dataset|report)(\.v\d+)?\.json")
DONE = ".done"
LARGEST_PLAN = LARGEST_DONE = 64 << 20  # bytes
LOCK_SECONDS = 1.0  # what a killed converter's processes take to let go of the lock


def report_name(version: int) -> str:
    """Return the name of the quality report of the conversion that has made a version."""
    return REPORT_NAME if version == 1 else f"report.v{version}.json"


class Unfinished(Shape, frozen=True):
    """A conversion that has been begun."""

    plan: Sha256
    files: tuple[Annotated[str, matches(OURS.pattern)], ...]
    """That it makes, besides the manifest."""


class ShardResult(Shape, frozen=True):
    """A written shard, and its lines of the quality report."""

    shard: Shard
    findings: tuple[ImageDefect, ...]


@dataclass(frozen=True)
class Target:
    """The paths of a conversion."""

    folder: Path

    @property
    def manifest(self) -> Path:
        """The data set manifest."""
        return self.folder / MANIFEST_NAME

    @property
    def work(self) -> Path:
        """The folder of an unfinished conversion."""
        return self.folder / ".converting"

    @property
    def plan(self) -> Path:
        """The plan of an unfinished conversion."""
        return self.work / "plan"

    def tar(self, name: str) -> Path:
        """Return the path of a shard."""
        return self.folder / name

    def read_part(self, shard: Shard, offset: int, length: int) -> bytes:
        """Return bytes of a finished shard from `offset` on."""
        return FolderSource.part(self.tar(shard.name), shard, offset, length)

    def done(self, name: str) -> Path:
        """Return the path of a finished shard's result."""
        return self.work / f"{name}{DONE}"

    def save_result(self, result: ShardResult, rows: np.ndarray) -> None:
        """Keep the result of a shard, and its rows of the index, until the folder is complete."""
        data = msgspec.json.encode(result) + b"\n" + rows.tobytes()
        write_whole(self.done(result.shard.name), data)

    def result(self, shard: PlannedShard) -> ShardResult | None:
        """Read the result of a shard; None unless it was written whole."""
        try:
            with self.done(shard.name).open("rb") as file:
                result = parsed(file.readline(), ShardResult, LARGEST_DONE)
            size = self.tar(shard.name).stat().st_size
        except (FileNotFoundError, Misshapen):
            return None
        return result if result.shard.bytes == size else None

    def rows(self, shard: PlannedShard) -> np.ndarray:
        """Read the rows of a finished shard."""
        return np.frombuffer(self.done(shard.name).read_bytes().partition(b"\n")[2], INDEX_FIELDS)

    @contextlib.contextmanager
    def locked(self, shared: bool = False) -> Iterator[None]:
        """Keep other converters away; the tasks of an array job share the lock."""
        with self.lock(shared) as holder:
            if holder:
                raise UsageError(f"{self.folder}: {holder} is writing to it; wait, or stop it")
            yield

    @contextlib.contextmanager
    def lock(self, shared: bool = False) -> Iterator[str]:
        """Take the lock, or yield who has it; it ends with the processes that hold it."""
        with translated_os_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            # O_NOFOLLOW: a link in a folder of many accounts would have another file truncated.
            path = self.folder / ".lock"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with os.fdopen(descriptor, "r+") as file:
            deadline = time.monotonic() + LOCK_SECONDS
            while not (is_held := locked(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)):
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_SECONDS)
            if not is_held:
                yield file.read().strip() or "another converter"
                return
            # The name is for the message of whoever is refused; the lock itself is the kernel's.
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            try:
                yield ""
            finally:
                file.truncate(0)

    def begin(self, plan: ShardPlan, force: bool, version: int = 1) -> None:
        """Make the folder ready for a plan, whose shards join those of earlier versions, if any.

        What an interrupted conversion of the same plan has finished is kept; anything else that is
        in the way is refused, or with `force` removed: all that was converted here, but of a later
        version only what another one has begun.
        """
        try:
            begun, listed = self._unfinished(), self._listed()
        except DataError as error:
            hint = "its files may not be rackrun's: name another folder, or move this one away"
            raise DataError(f"{error}; {hint}") from None
        planned = set(begun.files) if begun else set()
        # Its shards are listed if it was killed before it had tidied up.
        if any(name.endswith(".tar") for name in planned & listed):
            shutil.rmtree(self.work)
            begun = None
        if force and version == 1:
            self._remove(planned | listed)
        elif listed and version == 1:
            raise UsageError(
                f"{self.folder}: holds a finished data set from different input or options; choose "
                "another folder, or --force to replace it"
            )
        elif begun and begun.plan == plan.digest:
            return
        elif force and begun:
            self._remove(planned - listed)  # another version may have come meanwhile
        elif begun:
            raise UsageError(
                f"{self.folder}: holds an unfinished conversion of different input or options; type"
                " that command again, or add --force to give it up"
            )
        files = plan.files(version) | {report_name(version)}
        here = {path.name for path in self.folder.iterdir()}
        # What is listed by no manifest and no plan may not be ours, but an index of a later version
        # that never came is written over.
        foreign = here & {shard.name for shard in plan.shards}
        if version == 1:
            foreign = {each for each in here if each in files or OURS.fullmatch(each) and not force}
        if foreign:
            raise UsageError(
                f"{self.folder / min(foreign)}: not written by a conversion; choose another "
                "folder, or move it away"
            )
        with translated_os_errors(self.work):
            self.work.mkdir(exist_ok=True)
        write_whole(self.plan, msgspec.json.encode(Unfinished(plan.digest, tuple(sorted(files)))))

    def planned(self) -> set[str]:
        """Return the names of the files that an unfinished conversion makes; none without one."""
        return set(begun.files) if (begun := self._unfinished()) else set()

    def clear_partials(self, names: Container[str]) -> None:
        """Remove what processes that have ended left half written of these files."""
        for path in (*partials(self.folder), *partials(self.work)):
            if written_for(path).removesuffix(DONE) in names:
                path.unlink(missing_ok=True)

    def clear_work(self) -> None:
        """Remove what only an unfinished conversion needs."""
        self.clear_partials(self._listed())
        shutil.rmtree(self.work, ignore_errors=True)

    def holds(self, plan: ShardPlan) -> bool:
        """Return whether the folder is complete, and this very plan has made it."""
        return self.manifest.exists() and self.read().plan_sha256 == plan.digest

    def read(self) -> Manifest:
        """Return the manifest of the finished folder."""
        return FolderSource(str(self.folder)).manifest

    def _unfinished(self) -> Unfinished | None:
        try:
            return parsed_file(self.plan, Unfinished, LARGEST_PLAN)
        except FileNotFoundError:
            return None
        except Misshapen as error:
            raise DataError(f"{self.plan}: not the plan of a conversion: {error}") from None

    def _listed(self) -> set[str]:
        """Return the files of all versions that are ours; none without a manifest."""
        if not self.manifest.exists():
            return set()
        newest, names = self.read(), {MANIFEST_NAME}
        for version in range(1, newest.number + 1):  # also where its manifest is gone
            names |= {manifest_name(version), report_name(version)}
            names |= {index_name(newest.dataset, split, version) for split in (TRAIN, VAL, TEST)}
        for source in sources_of(str(self.folder)):
            shards = {shard.name for split in source.manifest.splits for shard in split.shards}
            if newest.adopted:  # the tars are other programs', only links to them are ours
                shards = {name for name in shards if (self.folder / name).is_symlink()}
            names |= shards
        return {name for name in names if OURS.fullmatch(name)}

    def _remove(self, names: set[str]) -> None:
        # Without its manifest the folder is no data set, so that none ever lacks shards.
        for name in sorted(names, key=lambda name: name != MANIFEST_NAME):
            (self.folder / name).unlink(missing_ok=True)
        self.clear_partials(names)
        shutil.rmtree(self.work, ignore_errors=True)


def shard_files(folder: Path, dataset: str) -> set[str]:
    """Return the names of the shards and indexes of a data set that lie in a folder."""
    pattern = re.compile(f"{re.escape(dataset)}{SHARD_FILE}")
    return {path.name for path in folder.iterdir() if pattern.fullmatch(path.name)}
