"""The end of a conversion: indexes, quality report and, when all else is there, the manifest."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from pathlib import Path

from convert.images.info import LEFT_OUT
from convert.packing.copies import copies, leaks_refused, local_files
from convert.packing.output_folder import Target
from convert.packing.plan import ShardPlan, records_of
from convert.packing.quality_report import print_report, save_report
from convert.packing.shard_result import ShardResult, finished
from convert.readers.records import ImageDefect
from rackrun.atomic import write_whole
from rackrun.commands import called
from rackrun.contract.tasks import TASKS
from rackrun.errors import DataError
from rackrun.terminal import say
from shards.index import (
    INDEX_FIELDS,
    PACKED_ROW,
    Manifest,
    Row,
    Shard,
    Split,
    index_name,
    serialise_index,
)

LABEL = Row._fields.index("label")
FEW, MANY = 10, 100  # images that may be left out of the smallest and of middling sets


def close_folder(
    target: Target, plan: ShardPlan, allowed: int | None, allow: Sequence[str] = ()
) -> None:
    """Turn a folder in which every planned shard is finished into a complete one."""
    outcomes = [_outcome(target, plan, number) for number in range(len(plan.shards))]
    findings = [*plan.findings, *(finding for each in outcomes for finding in each.findings)]
    stored = sum(each.shard.samples for each in outcomes)
    wrong = objection(target, plan, outcomes, allowed)
    if not wrong:
        duplicates = list(_copies(target, plan, outcomes))
        findings += duplicates
        # Nobody can mend a published set, and its accuracy is compared as it is.
        if "leaks" not in allow and not plan.as_published and (leaks := leaks_refused(duplicates)):
            wrong = f"{leaks}; take them out of the source and add --force, or add --allow leaks"
    save_report(target.report, findings, stored, plan.check)
    if wrong:
        raise DataError(f"{target.folder}: {wrong}; all names: {target.report}")
    manifest = Manifest(
        dataset=plan.dataset,
        classes=plan.classes,
        splits=tuple(_write_split(target, plan, name, outcomes) for name in _split_names(plan)),
        seed=plan.seed,
        preset=asdict(plan.preset),
        sources=plan.origins,
        report=dict(sorted(Counter(finding.kind for finding in findings).items())),
        plan_sha256=plan.digest,
        tiles=plan.tiles,
    )
    write_whole(target.manifest, manifest.serialise())
    target.clear_work()
    print_report(target.report, findings, stored, plan.check)
    print_use(target.folder, plan.dataset)


def print_use(folder: Path, dataset: str) -> None:
    """Print the command that trains on a finished folder."""
    task = dataset if dataset in TASKS else "classify"
    say(f"to train on it, type: {called('local')} {task} --data {shlex.quote(str(folder))}")


def objection(
    target: Target, plan: ShardPlan, outcomes: Sequence[ShardResult], allowed: int | None
) -> str:
    """Return why these shards may not become a data set; empty if they may.

    So much is missing that the source has failed rather than a few images, or all of a class is:
    then the shards that are short are made again by the next run, unless it allows for the loss.
    """
    lost = [finding for finding in plan.findings if finding.is_loss]
    lost += [finding for each in outcomes for finding in each.findings if finding.is_loss]
    usual = 0 if plan.needs_all else may_be_lost(plan.images)
    limit = usual if allowed is None else allowed
    if len(lost) > limit:
        return (
            f"{len(lost):,} of {plan.images:,} images cannot be used ({_kinds(lost)}), and "
            f"{limit:,} may be missing: if the source has failed, run the same command when it is "
            f"whole again; if they are to be left out, add --allow-left-out {len(lost)}"
        )
    labels = {row[LABEL] for each in outcomes for row in PACKED_ROW.iter_unpack(each.rows)}
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


def _kinds(lost: list[ImageDefect]) -> str:
    counts = Counter(finding.kind for finding in lost)
    return ", ".join(f"{count:,} {LEFT_OUT[kind]}" for kind, count in counts.most_common())


def _copies(
    target: Target, plan: ShardPlan, outcomes: Sequence[ShardResult]
) -> Iterator[ImageDefect]:
    """Yield the exact copies among the images of finished shards, by their names in the source."""
    import numpy as np

    planned = {shard.name: shard for shard in plan.shards}

    @lru_cache(1)  # copies are named shard by shard
    def names(shard: str) -> dict[str, str]:
        return {record.key: record.name for record in records_of(target.plan, planned[shard])}

    indexes, shards = [], defaultdict[str, list[Shard]](list)
    for shard, outcome in zip(plan.shards, outcomes, strict=True):
        indexes.append((shard.split, np.frombuffer(outcome.rows, INDEX_FIELDS)))
        shards[shard.split].append(outcome.shard)
    return copies(
        indexes,
        shards,
        plan.classes,
        local_files(target.tar),
        lambda split, shard, key: names(shard.name)[key],
    )


def _outcome(target: Target, plan: ShardPlan, number: int) -> ShardResult:
    outcome = finished(target, plan, plan.shards[number])
    if outcome is None:
        raise DataError(f"{target.folder}: {plan.shards[number].name} has vanished; run it again")
    return outcome


def _split_names(plan: ShardPlan) -> list[str]:
    return sorted({shard.split for shard in plan.shards})


def _write_split(target: Target, plan: ShardPlan, name: str, outcomes: list[ShardResult]) -> Split:
    """Write the index of one split; return its entry of the manifest."""
    parts = [
        outcome for outcome, shard in zip(outcomes, plan.shards, strict=True) if shard.split == name
    ]
    index = serialise_index(b"".join(part.rows for part in parts))
    file_name = index_name(plan.dataset, name)
    write_whole(target.folder / file_name, index)
    shards = tuple(part.shard for part in parts)
    samples = sum(shard.samples for shard in shards)
    return Split(name, samples, file_name, sha256(index).hexdigest(), shards)
