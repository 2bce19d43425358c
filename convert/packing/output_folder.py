"""The folder that is converted into: its paths, its lock, its earlier content.

OUT/cats-train-000000.tar …  appear one by one, each whole
OUT/.converting/plan         the plan, until the conversion is complete
OUT/.converting/*.done       the result of each shard: digest, rows, findings
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

from rackrun.atomic import partials, translated_os_errors, write_whole, written_for
from rackrun.contract.files import LARGEST_MANIFEST, MANIFEST_NAME
from rackrun.convert.packing.plan import PlannedShard, ShardPlan, head_of, load_plan
from rackrun.convert.readers.records import ImageDefect
from rackrun.errors import DataError, UsageError
from rackrun.shards.folder import FolderSource
from rackrun.shards.index import Manifest, Shard, manifest_name, read_version

REPORT_NAME = "report.json"
SHARD_FILE = r"-[a-z]+(-\d{6}\.tar|(\.v\d+)?\.index\.npy)"
OURS = re.compile(rf"[\w-]+{SHARD_FILE}|(dataset|report)(\.v\d+)?\.json")
DONE = ".done"
LOCK_SECONDS = 1.0  # what a killed converter's processes take to let go of the lock


def report_name(version: int) -> str:
    """Return the name of the quality report of the conversion that has made a version."""
    return REPORT_NAME if version == 1 else f"report.v{version}.json"


def shard_files(folder: Path, dataset: str) -> set[str]:
    """Return the names of the shards and indexes of a data set that lie in a folder."""
    pattern = re.compile(f"{re.escape(dataset)}{SHARD_FILE}")
    return {path.name for path in folder.iterdir() if pattern.fullmatch(path.name)}


@dataclass
class ShardResult:
    """A written shard, its rows of the index and its lines of the quality report."""

    shard: Shard
    rows: bytes
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

    def report(self, version: int = 1) -> Path:
        """Return the quality report of the conversion that has made a version."""
        return self.folder / report_name(version)

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

    def save_result(self, plan: ShardPlan, result: ShardResult) -> None:
        """Keep the result of a shard until the folder is complete.

        Its file is a line of JSON, then the rows as the index has them.
        """
        head = {
            "plan": plan.digest,
            "shard": asdict(result.shard),
            "findings": result.findings,
        }
        data = json.dumps(head).encode() + b"\n" + result.rows
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
        except (ValueError, KeyError, TypeError):
            return None
        return ShardResult(written, rows, findings) if is_whole else None

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
                raise UsageError(f"{self.folder}: {holder} is converting into it; wait, or stop it")
            # The name is for the message of whoever is refused; the lock itself is the kernel's.
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            try:
                yield
            finally:
                file.truncate(0)

    def adopt(self, plan: ShardPlan, force: bool) -> bool:
        """Make the folder ready for a plan: True to convert, False if that is done already.

        What an interrupted conversion of the same plan has finished is kept; anything else in the
        folder is refused, or with `force` removed. Raises DataError where a damaged manifest does
        not say what that is.
        """
        try:
            return self._adopt(plan, force)
        except DataError as error:
            hint = (
                "what it lists is not known to be ours: name another folder, or move this one away"
            )
            raise DataError(f"{error}; {hint}") from None

    def _adopt(self, plan: ShardPlan, force: bool) -> bool:
        if force:
            self.clear()
            # What is still here is listed by no manifest and no plan, so it may not be ours.
            for name in sorted(plan.files() | {REPORT_NAME}):
                if (self.folder / name).exists():
                    raise UsageError(
                        f"{self.folder / name}: no conversion here has made it; move it elsewhere"
                    )
        elif self.manifest.exists():
            manifest = self.read()
            if manifest.plan_sha256 == plan.digest:
                self.clear_work()
                return False
            self._refuse(
                f"holds a finished data set ({manifest.dataset}) from different input or options"
            )
        elif self.plan.exists():
            if head_of(self.plan) != plan.head():
                self._refuse("holds an unfinished conversion of different input or options")
        elif foreign := sorted(e.name for e in self.folder.iterdir() if OURS.fullmatch(e.name)):
            raise UsageError(
                f"{self.folder / foreign[0]}: no conversion here has made it; choose another"
                " folder, or move it elsewhere"
            )
        with translated_os_errors(self.work):
            self.work.mkdir(exist_ok=True)
        return True

    def versions(self) -> Iterator[Manifest]:
        """Yield the manifests of all versions that are here, the newest first."""
        newest = self.read()
        yield newest
        for number in range(newest.number - 1, 0, -1):
            if (self.folder / manifest_name(number)).exists():
                yield read_version(newest, number, self._source.read_file, str(self.folder))

    def clear(self) -> None:
        """Remove what the manifests or the plan list, the manifest first; the rest stays."""
        names = self._listed()
        # Without its manifest the folder is no data set, so that none ever lacks shards.
        for name in sorted(names, key=lambda name: name != MANIFEST_NAME):
            (self.folder / name).unlink(missing_ok=True)
        self._clear_work(names)

    def clear_partials(self, shards: Iterable[PlannedShard]) -> None:
        """Remove what processes that have ended left half written of these shards."""
        names = {shard.name for shard in shards}
        for path in (*partials(self.folder), *partials(self.work)):
            if written_for(path).removesuffix(DONE) in names:
                path.unlink(missing_ok=True)

    def clear_work(self) -> None:
        """Remove what only an unfinished conversion needs."""
        self._clear_work(self._listed())

    def _clear_work(self, names: set[str]) -> None:
        for path in partials(self.folder):
            if written_for(path) in names:
                path.unlink(missing_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)

    def _listed(self) -> set[str]:
        names = {MANIFEST_NAME, REPORT_NAME}
        if self.manifest.exists():
            for manifest in self.versions():
                names |= {manifest_name(manifest.number), report_name(manifest.number)}
                files = manifest.files()
                if manifest.adopted:  # the tars are other programs', only links to them are ours
                    links = {name for name in files if (self.folder / name).is_symlink()}
                    files = links | {split.index for split in manifest.splits}
                names |= files
        elif self.plan.exists():
            names |= load_plan(self.plan).files()
        else:
            return set()
        return {name for name in names if OURS.fullmatch(name)}

    def read(self) -> Manifest:
        """Return the manifest of the finished folder."""
        text = self._source.read_file(MANIFEST_NAME, LARGEST_MANIFEST)
        return Manifest.parse(text, str(self.manifest))

    @property
    def _source(self) -> FolderSource:
        # Which reads files up to a limit, and only if they are files.
        return FolderSource(str(self.folder))

    def _refuse(self, what: str) -> None:
        raise UsageError(f"{self.folder}: {what}; choose another folder, or --force to replace it")


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
