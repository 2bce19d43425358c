"""The end of a conversion: indexes, quality report and, when all else is there, the manifest."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import numpy as np

from rackrun.atomic import write_whole
from rackrun.commands import called
from rackrun.contract.tasks import TASKS
from rackrun.convert.images.info import LEFT_OUT
from rackrun.convert.packing.copies import (
    NameImage,
    SplitRows,
    copies,
    leaks_refused,
    local_files,
)
from rackrun.convert.packing.output_folder import ShardResult, Target, report_name
from rackrun.convert.packing.plan import ShardPlan
from rackrun.convert.packing.quality_report import print_report, save_report
from rackrun.convert.readers.records import ImageDefect
from rackrun.errors import DataError
from rackrun.shards.index import (
    Manifest,
    Shard,
    Split,
    index_name,
    serialise_index,
)
from rackrun.terminal import clean, say
from rackrun.units import first_few, plural

FEW, MANY = 10, 100  # images that may be left out of the smallest and of middling sets

FindCopies = Callable[[Sequence[SplitRows], NameImage], Sequence[ImageDefect]]
"""Returns the copies among the images of some splits."""


def close_folder(
    target: Target, plan: ShardPlan, allowed: int | None, allow: Sequence[str] = ()
) -> None:
    """Turn a folder in which every planned shard is finished into a complete one."""

    def find(parts: Sequence[SplitRows], name_image: NameImage) -> list[ImageDefect]:
        return [*copies(parts, plan.classes, local_files(target.tar), name_image)]

    # Nobody can repair a published data set, and its accuracy is compared as it is.
    may_leak = "leaks" in allow or plan.as_published
    parts, found = checked_parts(target, plan, allowed, may_leak, find)
    manifest = Manifest(
        dataset=plan.dataset,
        classes=plan.classes,
        splits=tuple(write_split(target.folder, plan.dataset, part) for part in parts),
        seed=plan.seed,
        preset=asdict(plan.preset),
        # Of a published set, no orientation is applied, and yet photos to predict are turned.
        upright=plan.upright or plan.as_published,
        sources=plan.origins,
        report=dict(sorted(Counter(finding.kind for finding in found).items())),
        plan_sha256=plan.digest,
    )
    write_whole(target.manifest, manifest.serialise())
    target.clear_work()
    for part in parts:
        labels = set(part.rows["label"].tolist())
        if names := [name for label, name in enumerate(plan.classes) if label not in labels]:
            which = f"{plural(len(names), 'class', 'classes')}: {first_few(names, 5)}"
            say(clean(f"{part.split} has no images of {which}"))
    print_use(target.folder, plan.dataset)


def checked_parts(
    target: Target,
    plan: ShardPlan,
    allowed: int | None,
    may_leak: bool,
    find: FindCopies,
    version: int = 1,
) -> tuple[list[SplitRows], list[ImageDefect]]:
    """Return what was converted, by split, and all findings; the report is saved and printed.

    DataError where too many images are left out, or one leaks.
    """
    results = list[ShardResult]()
    for shard in plan.shards:
        if not (result := target.result(plan, shard)):
            raise DataError(f"{target.folder}: {shard.name} has disappeared; convert again")
        results.append(result)
    found = [*plan.findings, *(finding for each in results for finding in each.findings)]
    stored = sum(each.shard.samples for each in results)
    wrong = objection(plan, results, allowed)
    parts = _parts(plan, results)
    if not wrong:
        duplicates = find(parts, _names(target, plan))
        found += duplicates
        if not may_leak and (leaks := leaks_refused(duplicates)):
            wrong = f"{leaks}; take them out of the source and add --force, or add --allow leaks"
    report = target.folder / report_name(version)
    save_report(report, found, stored)
    if wrong:
        raise DataError(f"{target.folder}: {wrong}; all names: {report}")
    print_report(report, found, stored)
    return parts, found


def print_use(folder: Path, dataset: str) -> None:
    """Print the command that trains on a finished folder."""
    task = dataset if dataset in TASKS else "classify"
    say(f"to train on it, type: {called('local')} {task} --data {shlex.quote(str(folder))}")


def objection(plan: ShardPlan, results: Sequence[ShardResult], allowed: int | None) -> str:
    """Return why these shards may not become a data set; empty if they may.

    So much is missing that the source has failed rather than a few images, or all of a class is:
    then the shards that are short are made again by the next run, unless it allows for the loss.
    """
    lost = [finding for finding in plan.findings if finding.is_loss]
    lost += [finding for each in results for finding in each.findings if finding.is_loss]
    limit = allowed
    if limit is None:
        limit = 0 if plan.needs_all else may_be_lost(plan.images)
    if len(lost) > limit:
        kinds = Counter(finding.kind for finding in lost).most_common()
        reasons = ", ".join(f"{count:,} {LEFT_OUT[kind]}" for kind, count in kinds)
        return (
            f"{len(lost):,} of {plan.images:,} images cannot be used ({reasons}), and "
            f"{limit:,} may be missing: if the source has failed, type the same command when it is "
            f"complete again; to leave them out, add --allow-left-out {len(lost)}"
        )
    labels = {*plan.unused}.union(*(each.rows["label"].tolist() for each in results))
    missing = [name for label, name in enumerate(plan.classes) if label not in labels]
    return f"class {missing[0]}: no image of it is whole" if missing else ""


def may_be_lost(images: int) -> int:
    """Return how many images may be left out of a set without --allow-left-out.

    One in a hundred, or up to 100 of a small set, but not more than a tenth of it.
    """
    return max(images // 100, min(images // 10, MANY), FEW)


def write_split(folder: Path, dataset: str, part: SplitRows, version: int = 1) -> Split:
    """Write the index of a split; return its entry of the manifest."""
    index = serialise_index(part.rows.tobytes())
    name = index_name(dataset, part.split, version)
    write_whole(folder / name, index)
    samples = sum(shard.samples for shard in part.shards)
    return Split(part.split, samples, name, sha256(index).hexdigest(), tuple(part.shards))


def _parts(plan: ShardPlan, results: Sequence[ShardResult]) -> list[SplitRows]:
    by_split = defaultdict[str, list[ShardResult]](list)
    for shard, result in zip(plan.shards, results, strict=True):
        by_split[shard.split].append(result)
    return [
        SplitRows(
            split,
            [each.shard for each in made],
            np.concatenate([each.rows for each in made]),
        )
        for split, made in sorted(by_split.items())
    ]


def _names(target: Target, plan: ShardPlan) -> NameImage:
    """Return what names the images of the plan's shards as the source does."""
    planned = {shard.name for shard in plan.shards}
    names = lru_cache(1)(target.names)  # copies are named shard by shard

    def name_image(shard: Shard, key: str) -> str:
        return names(shard.name)[key] if shard.name in planned else f"{shard.name}/{key}"

    return name_image
