"""The end of a conversion: indexes, quality report and, when all else is there, the card."""

from collections import Counter
from dataclasses import asdict
from hashlib import sha256

from convert.outcome import Outcome, finished
from convert.plan import Plan
from convert.report import print_report, save_report
from convert.target import Target
from shards.errors import DataError
from shards.index import PACKED_ROW, Card, Split, index_name, serialise_index
from shards.whole import write_whole

LABEL = 5  # place of the label in a row


def close_folder(target: Target, plan: Plan) -> None:
    """Turn a folder in which every planned shard is finished into a complete one."""
    outcomes = [_outcome(target, plan, number) for number in range(len(plan.shards))]
    _refuse_empty(plan, outcomes)
    found = [*plan.findings, *(finding for each in outcomes for finding in each.findings)]
    stored = sum(each.shard.samples for each in outcomes)
    save_report(target.report, found, stored, plan.check)
    card = Card(
        dataset=plan.dataset,
        classes=plan.classes,
        splits=tuple(_write_split(target, plan, name, outcomes) for name in _split_names(plan)),
        seed=plan.seed,
        preset=asdict(plan.preset),
        sources=plan.origins,
        report=dict(sorted(Counter(finding.kind for finding in found).items())),
        plan_sha256=plan.digest,
    )
    write_whole(target.card, card.serialise())
    target.clear_work()
    print_report(target.report, found, stored, plan.check)


def _outcome(target: Target, plan: Plan, number: int) -> Outcome:
    outcome = finished(target, plan, plan.shards[number])
    if outcome is None:
        raise DataError(f"{target.folder}: {plan.shards[number].name} has vanished; run it again")
    return outcome


def _refuse_empty(plan: Plan, outcomes: list[Outcome]) -> None:
    """A shard or a class of which nothing is left would fail the training, so it fails here."""
    for outcome in outcomes:
        if not outcome.shard.samples:
            raise DataError(
                f"{outcome.shard.name}: no picture in it is whole; ask for fewer --shards"
            )
    labels = {row[LABEL] for outcome in outcomes for row in PACKED_ROW.iter_unpack(outcome.rows)}
    for label, name in enumerate(plan.classes):
        if label not in labels:
            raise DataError(f"class {name}: no picture of it is whole")


def _split_names(plan: Plan) -> list[str]:
    return sorted({shard.split for shard in plan.shards})


def _write_split(target: Target, plan: Plan, name: str, outcomes: list[Outcome]) -> Split:
    """Write the index of one split; what the card says about the split."""
    parts = [
        outcome for outcome, shard in zip(outcomes, plan.shards, strict=True) if shard.split == name
    ]
    index = serialise_index(b"".join(part.rows for part in parts))
    file_name = index_name(plan.dataset, name)
    write_whole(target.folder / file_name, index)
    shards = tuple(part.shard for part in parts)
    samples = sum(shard.samples for shard in shards)
    return Split(name, samples, file_name, sha256(index).hexdigest(), shards)
