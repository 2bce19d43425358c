"""The end of a conversion: indexes, quality report and, when all else is there, the manifest."""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from hashlib import sha256
from itertools import groupby
from pathlib import Path

import numpy as np

from rackrun.atomic import write_whole
from rackrun.commands import called
from rackrun.contract.tasks import TASKS
from rackrun.convert.images.info import LEFT_OUT
from rackrun.convert.options import Packing
from rackrun.convert.packing.copies import (
    NameImage,
    SplitRows,
    copies,
    leaks_refused,
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
    serialize_index,
)
from rackrun.shards.resize import Resize
from rackrun.terminal import say
from rackrun.units import first_few, plural

NAMED = 5  # classes that a line names
FEW, MANY = 10, 100  # images that may be left out of the smallest and of middling sets


def close_folder(target: Target, plan: ShardPlan, packing: Packing) -> None:
    """Turn a folder in which every planned shard is finished into a complete one."""
    parts, findings = checked_parts(target, plan, packing)
    listing = plan.listing
    manifest = Manifest(
        dataset=listing.dataset,
        classes=listing.classes,
        splits=tuple(write_split(target.folder, listing.dataset, part) for part in parts),
        preset=asdict(plan.treatment.preset),
        # Of a published set, no orientation is applied, and yet photos to predict are turned.
        upright=plan.treatment.upright or listing.as_published,
        sources=plan.origins,
        report=counted(findings),
        plan_sha256=plan.digest,
    )
    if stored := listing.stored:
        manifest = replace(
            manifest,
            upright=stored.upright,
            preset=asdict(plan.treatment.preset.after(Resize.of(stored))),
            sources=stored.sources or manifest.sources,
        )
    write_whole(target.manifest, manifest.serialize())
    target.clear_work()
    say_missing_classes(parts, listing.classes)
    print_use(target.folder, listing.dataset)


def checked_parts(
    target: Target,
    plan: ShardPlan,
    packing: Packing,
    before: Sequence[SplitRows] = (),
    version: int = 1,
) -> tuple[list[SplitRows], list[ImageDefect]]:
    """Return all splits, and what was found while they were converted, saved and printed.

    `before`: the splits of the version that the shards join. DataError where too many images are
    left out, or one leaks.
    """
    results = list[ShardResult]()
    for shard in plan.shards:
        if not (result := target.result(shard)):
            raise DataError(f"{target.folder}: {shard.name} has disappeared; convert again")
        results.append(result)
    findings = [*plan.findings, *(finding for each in results for finding in each.findings)]
    stored = sum(each.shard.samples for each in results)
    parts = joined(before, _parts(target, plan, results))
    if wrong := _objection(target, plan, findings, packing.allow_left_out):
        for each in results:  # the source may be complete by the next run, which makes these again
            if any(finding.is_loss for finding in each.findings):
                target.done(each.shard.name).unlink(missing_ok=True)
    else:
        findings += copies(parts, plan.listing.classes, target.read_part, _names(plan), before)
        # Nobody can repair a published data set, and its accuracy is compared as it is.
        if "leaks" not in packing.allow and not plan.listing.as_published:
            wrong = leaks_refused(findings)
    conclude(target.folder / report_name(version), findings, stored, wrong)
    return parts, findings


def conclude(report: Path, findings: list[ImageDefect], stored: int, wrong: str) -> None:
    """Save and print what was found; DataError where `wrong` says why this is no data set."""
    save_report(report, findings, stored)
    if wrong:
        raise DataError(f"{report.parent}: {wrong}; all names: {report}")
    print_report(report, findings, stored)


def joined(before: Sequence[SplitRows], added: Iterable[SplitRows]) -> list[SplitRows]:
    """Return all splits, with the shards that are added to each behind those that it has."""
    parts = {part.split: part for part in before}
    for more in added:
        had = parts.get(more.split, SplitRows(more.split, (), more.rows[:0]))
        rows = more.rows.copy()
        rows["shard"] += len(had.shards)
        shards = (*had.shards, *more.shards)
        parts[more.split] = SplitRows(more.split, shards, np.concatenate([had.rows, rows]))
    return [parts[name] for name in sorted(parts)]


def counted(findings: Iterable[ImageDefect]) -> dict[str, int]:
    """Return how many findings of each kind there are, as a manifest has it."""
    return dict(sorted(Counter(finding.kind for finding in findings).items()))


def say_missing_classes(parts: Sequence[SplitRows], classes: Sequence[str]) -> None:
    """Say of each split which classes it has no image of."""
    for part in parts:
        labels = set(part.rows["label"].tolist())
        if missing := [name for label, name in enumerate(classes) if label not in labels]:
            count = f"{len(missing):,} of {plural(len(classes), 'class', 'classes')}"
            say(f"{part.split} has no image of {count}: {first_few(missing, NAMED)}")


def print_use(folder: Path, dataset: str) -> None:
    """Print the command that trains on a finished folder."""
    task = dataset if dataset in TASKS else "classify"
    say(f"to train on it, type: {called('local')} {task} --data {shlex.quote(str(folder))}")


def _objection(
    target: Target, plan: ShardPlan, findings: Sequence[ImageDefect], allowed: int | None
) -> str:
    """Return why the finished shards may not become a data set; empty if they may.

    So much is missing that the source has failed rather than a few images, or all of a class is.
    """
    if allowed is None and plan.listing.needs_all:
        allowed = 0
    if lost := losses_refused(findings, len(plan.table), allowed):
        return lost
    stored = np.concatenate([target.rows(shard)["label"] for shard in plan.shards])
    missing = np.setdiff1d(plan.table.rows["label"], stored).tolist()
    return f"class {plan.listing.classes[missing[0]]}: no image of it is whole" if missing else ""


def losses_refused(findings: Iterable[ImageDefect], images: int, allowed: int | None) -> str:
    """Return why a data set is refused that lacks more images than allowed; else nothing.

    By default one in a hundred may be missing, or up to 100 of a small set, but not more than a
    tenth of it.
    """
    if allowed is None:
        allowed = max(images // 100, min(images // 10, MANY), FEW)
    lost = Counter(finding.kind for finding in findings if finding.is_loss)
    if lost.total() <= allowed:
        return ""
    reasons = ", ".join(f"{count:,} {LEFT_OUT[kind]}" for kind, count in lost.most_common())
    return (
        f"{lost.total():,} of {images:,} images cannot be used ({reasons}), and {allowed:,} may be "
        "missing: if the source has failed, type the same command when it is complete again; to "
        f"leave them out, add --allow-left-out {lost.total()}"
    )


def write_split(folder: Path, dataset: str, part: SplitRows, version: int = 1) -> Split:
    """Write the index of a split; return its entry of the manifest."""
    index = serialize_index(part.rows)
    name = index_name(dataset, part.split, version)
    write_whole(folder / name, index)
    samples = sum(shard.samples for shard in part.shards)
    return Split(part.split, samples, name, sha256(index).hexdigest(), tuple(part.shards))


def _parts(target: Target, plan: ShardPlan, results: Sequence[ShardResult]) -> Iterator[SplitRows]:
    pairs = zip(plan.shards, results, strict=True)  # the shards of a split are a run
    for split, of_split in groupby(pairs, lambda pair: pair[0].split):
        planned, made = zip(*of_split, strict=True)
        rows = np.concatenate([target.rows(shard) for shard in planned])
        yield SplitRows(split, [result.shard for result in made], rows)


def _names(plan: ShardPlan) -> NameImage:
    """Return what names the images of the plan's shards as the source does."""
    planned = {shard.name: shard for shard in plan.shards}

    @lru_cache(1)  # copies are named shard by shard
    def names(shard: str) -> dict[str, str]:
        return {record.key: record.name for record in plan.records(planned[shard])}

    def name_image(shard: Shard, key: str) -> str:
        return names(shard.name)[key] if shard.name in planned else f"{shard.name}/{key}"

    return name_image
