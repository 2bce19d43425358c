"""The end of a conversion: indexes, quality report and, when all else is there, the manifest."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from rackrun.atomic import write_whole
from rackrun.commands import called
from rackrun.contract.tasks import TASKS
from rackrun.convert.images.info import LEFT_OUT
from rackrun.convert.packing.copies import SplitRows, copies, leaks_refused, local_files
from rackrun.convert.packing.output_folder import ShardResult, Target
from rackrun.convert.packing.plan import ShardPlan, records_of
from rackrun.convert.packing.quality_report import print_report, save_report
from rackrun.convert.readers.records import ImageDefect
from rackrun.errors import DataError
from rackrun.shards.index import (
    INDEX_FIELDS,
    PACKED_ROW,
    Manifest,
    Row,
    Shard,
    Split,
    index_name,
    serialise_index,
)
from rackrun.terminal import clean, say
from rackrun.units import first_few, plural

LABEL = Row._fields.index("label")
FEW, MANY = 10, 100  # images that may be left out of the smallest and of middling sets


def close_folder(
    target: Target, plan: ShardPlan, allowed: int | None, allow: Sequence[str] = ()
) -> None:
    """Turn a folder in which every planned shard is finished into a complete one."""
    results = list[ShardResult]()
    for shard in plan.shards:
        if not (result := target.result(plan, shard)):
            raise DataError(f"{target.folder}: {shard.name} has vanished; run it again")
        results.append(result)
    findings = [*plan.findings, *(finding for each in results for finding in each.findings)]
    stored = sum(each.shard.samples for each in results)
    wrong = objection(target, plan, results, allowed)
    parts = _parts(plan, results)
    if not wrong:
        duplicates = list(_copies(target, plan, parts))
        findings += duplicates
        # Nobody can mend a published set, and its accuracy is compared as it is.
        if "leaks" not in allow and not plan.as_published and (leaks := leaks_refused(duplicates)):
            wrong = f"{leaks}; take them out of the source and add --force, or add --allow leaks"
    report = target.report()
    save_report(report, findings, stored)
    if wrong:
        raise DataError(f"{target.folder}: {wrong}; all names: {report}")
    counts = Counter(finding.kind for finding in findings)
    write_whole(target.manifest, _manifest(target, plan, parts, counts).serialise())
    target.clear_work()
    print_report(report, findings, stored)
    if not plan.joins:
        _say_what_is_lacking(parts, plan.classes)
        print_use(target.folder, plan.dataset)


def _manifest(
    target: Target, plan: ShardPlan, parts: Sequence["_Part"], counts: Counter[str]
) -> Manifest:
    """Write the indexes; return the manifest."""
    splits = [
        write_split(target.folder, plan.dataset, name, rows, shards) for name, shards, rows in parts
    ]
    return Manifest(
        dataset=plan.dataset,
        classes=plan.classes,
        splits=tuple(splits),
        seed=plan.seed,
        preset=asdict(plan.preset),
        # Of a published set, no orientation is applied, and yet photos to predict are turned.
        upright=plan.upright or plan.as_published,
        sources=plan.origins,
        report=dict(sorted(counts.items())),
        plan_sha256=plan.digest,
    )


def _say_what_is_lacking(parts: Sequence["_Part"], classes: Sequence[str]) -> None:
    for part in parts:
        labels = {row[LABEL] for row in PACKED_ROW.iter_unpack(part.rows)}
        names = [name for label, name in enumerate(classes) if label not in labels]
        if names:
            which = f"{plural(len(names), 'class', 'classes')}: {first_few(names, 5)}"
            say(clean(f"{part.name} has no images of {which}"))


def print_use(folder: Path, dataset: str) -> None:
    """Print the command that trains on a finished folder."""
    task = dataset if dataset in TASKS else "classify"
    say(f"to train on it, type: {called('local')} {task} --data {shlex.quote(str(folder))}")


def objection(
    target: Target, plan: ShardPlan, results: Sequence[ShardResult], allowed: int | None
) -> str:
    """Return why these shards may not become a data set; empty if they may.

    So much is missing that the source has failed rather than a few images, or all of a class is:
    then the shards that are short are made again by the next run, unless it allows for the loss.
    """
    lost = [finding for finding in plan.findings if finding.is_loss]
    lost += [finding for each in results for finding in each.findings if finding.is_loss]
    usual = 0 if plan.needs_all else may_be_lost(plan.images)
    limit = usual if allowed is None else allowed
    if len(lost) > limit:
        kinds = Counter(finding.kind for finding in lost).most_common()
        reasons = ", ".join(f"{count:,} {LEFT_OUT[kind]}" for kind, count in kinds)
        return (
            f"{len(lost):,} of {plan.images:,} images cannot be used ({reasons}), and "
            f"{limit:,} may be missing: if the source has failed, run the same command when it is "
            f"whole again; if they are to be left out, add --allow-left-out {len(lost)}"
        )
    labels = {row[LABEL] for each in results for row in PACKED_ROW.iter_unpack(each.rows)}
    missing = [label for label in range(len(plan.classes)) if label not in labels]
    if missing and lost:
        records = chain.from_iterable(records_of(target.plan, shard) for shard in plan.shards)
        planned = {record.label for record in records}
        missing = [label for label in missing if label in planned]  # a table may name others
        return f"class {plan.classes[missing[0]]}: no image of it is whole" if missing else ""
    return ""


def may_be_lost(images: int) -> int:
    """Return how many images may be left out of a set without --allow-left-out.

    One in a hundred, or up to 100 of a small set, but not more than a tenth of it.
    """
    return max(images // 100, min(images // 10, MANY), FEW)


class _Part(NamedTuple):
    """A split of the data set that is being closed."""

    name: str
    shards: tuple[Shard, ...]
    rows: bytes


def _parts(plan: ShardPlan, results: Sequence[ShardResult]) -> list[_Part]:
    results_by_split = defaultdict[str, list[ShardResult]](list)
    for shard, result in zip(plan.shards, results, strict=True):
        results_by_split[shard.split].append(result)
    return [
        _Part(name, tuple(each.shard for each in made), b"".join(each.rows for each in made))
        for name, made in sorted(results_by_split.items())
    ]


def _copies(target: Target, plan: ShardPlan, parts: Sequence[_Part]) -> Iterator[ImageDefect]:
    """Yield the exact copies among the images of finished shards, by their names in the source."""
    import numpy as np

    planned = {shard.name: shard for shard in plan.shards}

    @lru_cache(1)  # copies are named shard by shard
    def names(shard: str) -> dict[str, str]:
        return {record.key: record.name for record in records_of(target.plan, planned[shard])}

    def name_image(split: str, shard: Shard, key: str) -> str:
        return names(shard.name)[key]

    return copies(
        [
            SplitRows(part.name, part.shards, np.frombuffer(part.rows, INDEX_FIELDS))
            for part in parts
        ],
        plan.classes,
        local_files(target.tar),
        name_image,
    )


def write_split(
    folder: Path, dataset: str, split: str, rows: bytes, shards: tuple[Shard, ...], version: int = 1
) -> Split:
    """Write the index of a split; return its entry of the manifest."""
    index, name = serialise_index(rows), index_name(dataset, split, version)
    write_whole(folder / name, index)
    samples = sum(shard.samples for shard in shards)
    return Split(split, samples, name, sha256(index).hexdigest(), shards)
