"""Tars in WebDataset's layout that other programs have written: an index and a manifest for them.

    tars -> in parallel: samples -> class, size and CRC-32 of each image, SHA-256 of the tar
         -> classes -> an index per split -> report -> manifest

No byte of the tars is changed. They may lie on a server that is only read.
"""

import contextlib
import os
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from tyro.conf import Positional

from convert.indexing.found_tars import FoundTar, found_tars
from convert.indexing.tar_index import IndexJob, TarIndex, index_tar
from convert.packing.finalize import may_be_lost, print_use
from convert.packing.output_folder import REPORT_NAME
from convert.packing.quality_report import print_report, save_report
from convert.packing.sidecars import remove_sidecars, write_sidecars
from convert.packing.workers import in_parallel
from convert.progress import Progress, meter
from convert.readers.records import ImageDefect
from rackrun.atomic import translated_os_errors, write_whole
from rackrun.contract.files import MANIFEST_NAME
from rackrun.errors import DataError, UsageError
from rackrun.machine import core_count
from rackrun.terminal import clean, say
from shards.index import (
    PACKED_ROW,
    Manifest,
    Row,
    Shard,
    Split,
    index_name,
    serialise_index,
    shard_name,
)

LABEL = Row._fields.index("label")


@dataclass(frozen=True)
class Index:
    """Tars of other programs, in WebDataset's layout: write an index, leave the tars unchanged."""

    sources: Positional[tuple[str, ...]]
    """Folder with tars, tars, or URLs of tars; {0000..0511} stands for numbers."""
    out: Path | None = None
    """Folder for index and manifest, if the tars' own folder is read-only."""
    name: str = ""
    """Name of the data set; by default the first tar's."""
    split: str = ""
    """Split of all tars: train, val or test; by default from each tar's name."""
    classes: Path | None = None
    """File with a class name per line, by number; without it the number is the name."""
    label_field: str = "label"
    """Field of .json members that holds the class."""
    allow_left_out: int | None = None
    """Damaged samples that may be left out; default: 1 %, or 10 % of a small set."""
    workers: int = 0
    """Processes; 0: one per core."""
    sidecars: bool = False
    """Also write index files for other programs: DALI's .idx, wids' JSON, Energon's .nv-meta."""
    force: bool = False
    """Replace an existing index."""

    def run(self) -> None:
        """Index them."""
        if self.workers < 0 or (self.allow_left_out or 0) < 0:
            raise UsageError("--workers and --allow-left-out cannot be negative")
        found = found_tars(self.sources, self.split, self.name)
        folder = self._folder(found.folder)
        names = self._names()
        indexed = self._indexed(found.tars, found.url, folder)
        classes, numbers = _classes(indexed, names)
        _refuse_duplicates(found.tars, indexed)
        findings = sorted(chain.from_iterable(each.findings for each in indexed))
        stored = sum(each.samples for each in indexed)
        save_report(folder / REPORT_NAME, findings, stored, "structure")
        self._check_losses(findings, stored, folder)
        placed = _placed(found.tars, folder, found.dataset, found.url)
        splits = tuple(
            _write_split(folder, found.dataset, split, numbers, part)
            for split, part in _by_split(found.tars, placed, indexed).items()
        )
        report = dict(sorted(Counter(finding.kind for finding in findings).items()))
        manifest = Manifest(
            found.dataset, classes, splits, report=report, adopted=True, tars=found.url
        )
        self._replace(folder, manifest)
        print_report(folder / REPORT_NAME, findings, stored, "structure")
        print_use(folder, found.dataset)

    def _replace(self, folder: Path, manifest: Manifest) -> None:
        """Write the manifest; files for other readers that belong to an earlier one go."""
        path = folder / MANIFEST_NAME
        if path.exists():
            with contextlib.suppress(DataError):
                remove_sidecars(folder, Manifest.parse(path.read_bytes(), str(path)))
        write_whole(path, manifest.serialise())
        if self.sidecars:
            write_sidecars(folder, self.workers or core_count())

    def _folder(self, beside: Path | None) -> Path:
        """Return the folder for index and manifest, ready to be written into."""
        folder = self.out or beside
        if folder is None:
            raise UsageError("the tars lie on a server: add --out FOLDER for their index")
        with translated_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise UsageError(f"{folder}: cannot be written: add --out FOLDER for the index")
        for name in (MANIFEST_NAME, REPORT_NAME):
            if (folder / name).exists() and not self.force:
                raise UsageError(
                    f"{folder / name}: is there already; add --force to replace it, or --out FOLDER"
                )
        return folder

    def _names(self) -> tuple[str, ...] | None:
        """Return the class names of --classes."""
        if self.classes is None:
            return None
        try:
            lines = self.classes.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise UsageError(f"--classes {self.classes}: cannot be read: {why}") from None
        return tuple(line.strip() for line in lines)

    def _indexed(self, tars: tuple[FoundTar, ...], url: str, scratch: Path) -> list[TarIndex]:
        """Return what was found in each tar, in their order."""
        jobs = [
            IndexJob(number, tar.path, tar.name, url, scratch, self.label_field)
            for number, tar in enumerate(tars)
        ]
        found: dict[int, TarIndex] = {}
        steps = in_parallel(jobs, index_tar, self.workers or core_count())
        with closing(steps), meter("indexed", len(jobs), "tars") as shown:
            for result in steps:
                found[result.number] = result
                shown.advance(Progress(1, result.size))
        return [found[number] for number in range(len(jobs))]

    def _check_losses(self, findings: list[ImageDefect], stored: int, folder: Path) -> None:
        lost = sum(finding.is_loss for finding in findings)
        limit = self.allow_left_out
        limit = may_be_lost(stored + lost) if limit is None else limit
        if lost > limit:
            raise DataError(
                f"{folder}: {lost:,} of {stored + lost:,} images cannot be used, and {limit:,} may "
                f"be missing; all names: {folder / REPORT_NAME}; if they are to be left out, add "
                f"--allow-left-out {lost}"
            )
        if not stored:
            raise DataError(
                f"{folder}: no sample in the tars has an image and a class; the class is read from"
                " .cls, .txt, or the field of .json that --label-field names"
            )


class IndexedTar(NamedTuple):
    """A tar of a split: the name by which it is read, and what is in it."""

    name: str
    found: TarIndex


def _by_split(
    tars: tuple[FoundTar, ...], names: list[str], indexed: list[TarIndex]
) -> dict[str, list[IndexedTar]]:
    """Return the tars of each split that have samples, in order."""
    parts: dict[str, list[IndexedTar]] = {}
    for tar, name, found in zip(tars, names, indexed, strict=True):
        if found.samples:
            parts.setdefault(tar.split, []).append(IndexedTar(name, found))
        else:
            say(f"{tar.name}: no samples in it: left out")
    return dict(sorted(parts.items()))


def _classes(
    indexed: list[TarIndex], names: tuple[str, ...] | None
) -> tuple[tuple[str, ...], dict[int | str, int]]:
    """Return the class table, and the number of each label in it."""
    labels = set[int | str]().union(*(each.labels for each in indexed))
    texts = sorted(label for label in labels if isinstance(label, str))
    numbers = [label for label in labels if isinstance(label, int)]
    if texts and numbers:
        raise DataError(
            f"some samples have a number as their class ({numbers[0]}), others a name "
            f"({texts[0]!r}); index them apart"
        )
    if numbers:
        count = max(numbers) + 1
        if names is not None and len(names) < count:
            raise UsageError(f"--classes: {len(names)} names, and a sample has class {count - 1}")
        table = names or tuple(map(str, range(count)))
        return table, {number: number for number in numbers}
    table = tuple(texts) if names is None else names
    unknown = sorted(set(texts) - set(table))
    if unknown:
        raise UsageError(f"--classes: no {unknown[0]!r} in it, which is the class of a sample")
    return table, {name: number for number, name in enumerate(table)}


def _refuse_duplicates(tars: tuple[FoundTar, ...], indexed: list[TarIndex]) -> None:
    """Raise DataError for a key that two tars of one split have."""
    seen: dict[tuple[str, bytes], Path] = {}
    for tar, found in zip(tars, indexed, strict=True):
        for mark, key in found.keys.items():
            earlier = seen.setdefault((tar.split, mark), tar.path)
            if earlier != tar.path:
                raise DataError(
                    clean(f"{tar.path}: {key}: is in {earlier}, too; leave one of them out")
                )


def _placed(tars: tuple[FoundTar, ...], folder: Path, dataset: str, url: str) -> list[str]:
    """Return the names by which the tars are read; links to those that lie elsewhere."""
    if url or all(tar.path.resolve().parent == folder.resolve() for tar in tars):
        return [tar.name for tar in tars]
    counts: Counter[str] = Counter()
    names = []
    for tar in tars:
        name = shard_name(dataset, tar.split, counts[tar.split])
        counts[tar.split] += 1
        link = folder / name
        with translated_os_errors(link):
            if link.is_symlink():
                link.unlink()
            link.symlink_to(tar.path.resolve())
        names.append(name)
    return names


def _write_split(
    folder: Path, dataset: str, split: str, numbers: dict[int | str, int], parts: list[IndexedTar]
) -> Split:
    """Write the index of a split; return its entry of the manifest."""
    rows = bytearray()
    for number, part in enumerate(parts):
        for packed in PACKED_ROW.iter_unpack(part.found.rows):
            row = Row(*packed)
            label = numbers[part.found.labels[row.label]]
            rows += PACKED_ROW.pack(*row._replace(shard=number, label=label))
    index, name = serialise_index(bytes(rows)), index_name(dataset, split)
    write_whole(folder / name, index)
    shards = tuple(
        Shard(part.name, part.found.samples, part.found.size, part.found.sha256) for part in parts
    )
    samples = sum(shard.samples for shard in shards)
    return Split(split, samples, name, sha256(index).hexdigest(), shards)
