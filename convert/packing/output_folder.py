"""The output folder of a conversion: its paths, its lock, its earlier content.

OUT/cats-train-000000.tar …  appear one by one, each whole
OUT/.converting/plan         the plan, until the conversion is complete
OUT/.converting/*.done       the result of each shard: digest, rows, findings, names
OUT/report.json              the quality report
OUT/*.index.npy, dataset.json  at the end: a folder with a manifest is complete

A later version adds tars, indexes, report.v2.json and, of the version before it, dataset.v1.json.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from rackrun.atomic import partials, translated_os_errors, write_whole, written_for
from rackrun.contract.files import LARGEST_MANIFEST, MANIFEST_NAME
from rackrun.convert.packing.plan import PlannedShard, ShardPlan
from rackrun.convert.readers.records import ImageDefect
from rackrun.errors import DataError, UsageError
from rackrun.shards.folder import FolderSource
from rackrun.shards.index import INDEX_FIELDS, Manifest, Shard, manifest_name, read_version

REPORT_NAME = "report.json"
SHARD_FILE = r"-[a-z]+(-\d{6}\.tar|(\.v\d+)?\.index\.npy)"
OURS = re.compile(rf"[\w-]+{SHARD_FILE}|(dataset|report)(\.v\d+)?\.json")
DONE = ".done"
LOCK_SECONDS = 1.0  # what a killed converter's processes take to let go of the lock


def report_name(version: int) -> str:
    """Return the name of the quality report of the conversion that has made a version."""
    return REPORT_NAME if version == 1 else f"report.v{version}.json"


@dataclass
class ShardResult:
    """A written shard, its rows of the index and its lines of the quality report."""

    shard: Shard
    rows: np.ndarray
    findings: list[ImageDefect] = field(default_factory=list)

    @property
    def is_short(self) -> bool:
        """Whether an image is missing that should have been there."""
        return any(finding.is_loss for finding in self.findings)


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

    def done(self, name: str) -> Path:
        """Return the path of a finished shard's result."""
        return self.work / f"{name}{DONE}"

    def save_result(self, plan: ShardPlan, result: ShardResult, names: dict[str, str]) -> None:
        """Keep the result of a shard until the folder is complete.

        Its file is a line of JSON, then the rows as the index has them; `names` are those of the
        images in the source, by key.
        """
        head = {
            "plan": plan.digest,
            "shard": asdict(result.shard),
            "findings": result.findings,
            "names": names,
        }
        data = json.dumps(head).encode() + b"\n" + result.rows.tobytes()
        write_whole(self.done(result.shard.name), data)

    def result(self, plan: ShardPlan, shard: PlannedShard) -> ShardResult | None:
        """Read the result of a shard; None unless it was written whole, for this very plan."""
        path, tar = self.done(shard.name), self.tar(shard.name)
        if not path.exists() or not tar.exists():
            return None
        head, _, rows = path.read_bytes().partition(b"\n")
        try:
            fields = json.loads(head)
            written = Shard(**fields["shard"])
            findings = [ImageDefect(*finding) for finding in fields["findings"]]
            is_whole = fields["plan"] == plan.digest and tar.stat().st_size == written.bytes
            if not is_whole:
                return None
            return ShardResult(written, np.frombuffer(rows, INDEX_FIELDS), findings)
        except (ValueError, KeyError, TypeError):
            return None

    def names(self, shard: str) -> dict[str, str]:
        """Return the names in the source of the images of a finished shard, by key."""
        names: dict[str, str] = json.loads(self.done(shard).read_bytes().partition(b"\n")[0])[
            "names"
        ]
        return names

    @contextlib.contextmanager
    def locked(self, shared: bool = False) -> Iterator[None]:
        """Keep other converters away; the tasks of an array job share the lock.

        The lock ends with the processes that hold it, however they end.
        """
        with translated_os_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            # O_NOFOLLOW: a link in a folder of many accounts would have another file truncated.
            path = self.folder / ".lock"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with os.fdopen(descriptor, "r+") as file:
            if not _locked_in_time(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
                holder = file.read().strip() or "another converter"
                raise UsageError(f"{self.folder}: {holder} is writing to it; wait, or stop it")
            # The name is for the message of whoever is refused; the lock itself is the kernel's.
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            try:
                yield
            finally:
                file.truncate(0)

    def begin(self, plan: ShardPlan, force: bool) -> bool:
        """Make the folder ready for a plan: True to convert, False if that is done already.

        What an interrupted conversion of the same plan has finished is kept; anything else in the
        folder is refused, or with `force` removed. Raises DataError where a damaged manifest does
        not say what that is.
        """
        try:
            if force:
                self._clear()
            elif self.manifest.exists():
                manifest = self.read()
                if manifest.plan_sha256 == plan.digest:
                    self.clear_work()
                    return False
                self._refuse(
                    f"holds a finished data set ({manifest.dataset}) from different input or "
                    "options"
                )
            elif self.plan.exists():
                if self.plan.read_bytes() != plan.serialise():
                    self._refuse("holds an unfinished conversion of different input or options")
                return True
        except DataError as error:
            hint = "its files may not be rackrun's: name another folder, or move this one away"
            raise DataError(f"{error}; {hint}") from None
        # What is still here is listed by no manifest and no plan, so it may not be ours.
        planned = plan.files() | {REPORT_NAME}
        here = sorted(path.name for path in self.folder.iterdir())
        for name in here:
            if name in planned or (OURS.fullmatch(name) and not force):
                self.refuse_foreign(name)
        self._save_plan(plan)
        return True

    def begin_append(self, plan: ShardPlan) -> None:
        """Make a finished folder ready for shards that join it.

        What an interrupted append of the same plan has finished is kept; another one is refused.
        """
        if self.plan.exists():
            if self.plan.read_bytes() != plan.serialise():
                raise UsageError(
                    f"{self.folder}: holds an unfinished append of different input or options; "
                    "type that command again, or add --force to give it up"
                )
            return
        for shard in plan.shards:
            if self.tar(shard.name).exists():
                self.refuse_foreign(shard.name)
        self._save_plan(plan)

    def give_up_append(self) -> None:
        """Remove what an unfinished append has made."""
        names = self.planned() - self.read().files() | {report_name(self.read().number + 1)}
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
        self._clear_work(names)

    def refuse_foreign(self, name: str) -> None:
        """Raise UsageError for a file that no conversion has written."""
        raise UsageError(
            f"{self.folder / name}: not written by a conversion; choose another folder, or move it"
            " away"
        )

    def planned(self) -> set[str]:
        """Return the names of the files that an unfinished conversion makes; none without one."""
        return ShardPlan.load(self.plan).files() if self.plan.exists() else set()

    def versions(self) -> Iterator[Manifest]:
        """Yield the manifests of all versions that are here, the newest first."""
        newest = self.read()
        yield newest
        for number in range(newest.number - 1, 0, -1):
            if (self.folder / manifest_name(number)).exists():
                yield read_version(newest, number, self._source.read_file, str(self.folder))

    def clear_partials(self, shards: Iterable[PlannedShard]) -> None:
        """Remove what processes that have ended left half written of these shards."""
        names = {shard.name for shard in shards}
        for path in (*partials(self.folder), *partials(self.work)):
            if written_for(path).removesuffix(DONE) in names:
                path.unlink(missing_ok=True)

    def clear_work(self) -> None:
        """Remove what only an unfinished conversion needs."""
        self._clear_work(self._listed())

    def read(self) -> Manifest:
        """Return the manifest of the finished folder."""
        text = self._source.read_file(MANIFEST_NAME, LARGEST_MANIFEST)
        return Manifest.parse(text, str(self.manifest))

    def _save_plan(self, plan: ShardPlan) -> None:
        with translated_os_errors(self.work):
            self.work.mkdir(exist_ok=True)
        write_whole(self.plan, plan.serialise())

    def _clear(self) -> None:
        """Remove what the manifests and the plan list, the manifest first; the rest stays."""
        names = self._listed() | self.planned()
        # Without its manifest the folder is no data set, so that none ever lacks shards.
        for name in sorted(names, key=lambda name: name != MANIFEST_NAME):
            (self.folder / name).unlink(missing_ok=True)
        self._clear_work(names)

    def _clear_work(self, names: set[str]) -> None:
        for path in partials(self.folder):
            if written_for(path) in names:
                path.unlink(missing_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)

    def _listed(self) -> set[str]:
        if not self.manifest.exists():
            return {MANIFEST_NAME, REPORT_NAME} if self.plan.exists() else set()
        names = {MANIFEST_NAME, REPORT_NAME}
        for manifest in self.versions():
            names |= {manifest_name(manifest.number), report_name(manifest.number)}
            files = manifest.files()
            if manifest.adopted:  # the tars are other programs', only links to them are ours
                links = {name for name in files if (self.folder / name).is_symlink()}
                files = links | {split.index for split in manifest.splits}
            names |= files
        return {name for name in names if OURS.fullmatch(name)}

    @property
    def _source(self) -> FolderSource:
        # Which reads files up to a limit, and only if they are files.
        return FolderSource(str(self.folder))

    def _refuse(self, what: str) -> None:
        raise UsageError(f"{self.folder}: {what}; choose another folder, or --force to replace it")


def shard_files(folder: Path, dataset: str) -> set[str]:
    """Return the names of the shards and indexes of a data set that lie in a folder."""
    pattern = re.compile(f"{re.escape(dataset)}{SHARD_FILE}")
    return {path.name for path in folder.iterdir() if pattern.fullmatch(path.name)}


def _locked_in_time(descriptor: int, kind: int) -> bool:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
