"""`rackrun doctor DATA [RUN]`: look for copies, odd images and wrong labels; doctor.html and .csv.

    every image read once -> Looks -> checks -> findings -> a table, doctor.csv, doctor.html
                                with a model: training's judge -> suspects -> findings

What needs a model also needs torch, which `convert` never imports: rackrun.cli.doctor, which knows
both packages, passes the judge of labels.
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import ClassVar

import numpy as np

from rackrun.commandline.options import Examples, Positional
from rackrun.commandline.parser import parse
from rackrun.commands import called
from rackrun.contract.suspects import FindSuspects, Question
from rackrun.convert.doctor import checks
from rackrun.convert.doctor.checks import (
    COLUMNS,
    DROP,
    EXACT,
    LABEL,
    PROBLEMS,
    RELABEL,
    Finding,
    ordered,
)
from rackrun.convert.doctor.fingerprints import (
    HAS_HASHES,
    SOUND,
    Fingerprints,
    ImagePosition,
    fingerprints_of,
)
from rackrun.convert.doctor.page import is_unchanged, write_page
from rackrun.convert.progress import Progress, meter
from rackrun.errors import UsageError, install_command
from rackrun.machine import core_count
from rackrun.runs import final_weights
from rackrun.shard_folder import folder_and_version
from rackrun.shards.open import open_source
from rackrun.tables import as_cell, table, write_table
from rackrun.terminal import clean, say


@dataclass(frozen=True)
class Doctor:
    """Look for copies, odd images, doubtful classes and, with a model, wrong labels in a data set.

    Nothing is changed: doctor.csv is the input of `convert drop` and `convert relabel`.
    """

    examples: ClassVar[Examples] = (
        ("{prog} data/shards", "look for copies and odd images"),
        ("{prog} data/shards runs/latest", "and for labels that the model doubts"),
        ("{prog} http://server:8080/ --out look/", "of a served folder, into another folder"),
    )

    data: Positional[str]
    """Shard folder, or the http(s):// URL of one; a version of it: DATA@2."""
    checkpoint: Positional[Path | None] = None
    """A model trained on these classes: a run folder, its final.pt, or a checkpoint."""
    out: Path = Path()
    """Folder for doctor.html and doctor.csv; one that was changed stays, beside doctor-2.csv."""
    model: str = ""
    """The model that the weights were trained with, if it is your own: `my_models:Net`."""
    task: str = ""
    """The task that the weights were trained for, if it is your own: `./my_task.py`."""
    workers: int = 0
    """Processes; 0: one per core."""


def run(args: Sequence[str], find_suspects: FindSuspects) -> int:
    """Look at a data set, write both files, and print what was found."""
    settings = parse(Doctor, called("doctor"), args)
    if settings.workers < 0:
        raise UsageError("--workers cannot be negative")
    if not settings.out.is_dir():
        folder = shlex.quote(str(settings.out))
        raise UsageError(f"--out {settings.out}: no such folder; type: mkdir -p {folder}")
    if settings.checkpoint is not None:
        # A checkpoint that is missing is refused before the images are read, which takes long.
        final_weights(settings.checkpoint)
    fingerprints, findings = examined(settings, find_suspects)
    table_path, page = _paths(settings.out)
    write_table(table_path, rows(fingerprints, findings))
    write_page(page, fingerprints, findings, table_path)
    _print(settings, fingerprints, findings, table_path, page)
    return 0


def _paths(folder: Path) -> tuple[Path, Path]:
    # A table that a person has worked on is never replaced.
    for number in count(1):
        stem = f"doctor-{number}" if number > 1 else "doctor"
        table_path, page = folder / f"{stem}.csv", folder / f"{stem}.html"
        if not table_path.exists() or is_unchanged(table_path, page):
            return table_path, page
        say(f"{table_path}: stays, as it was changed since a doctor wrote it")
    raise AssertionError


def examined(settings: Doctor, find_suspects: FindSuspects) -> tuple[Fingerprints, list[Finding]]:
    """Return what the images look like, and all findings in order."""
    workers = settings.workers or core_count()
    source = open_source(settings.data)
    fingerprints = fingerprints_of(source, workers)
    sound = {
        split: np.flatnonzero(prints["state"] == SOUND)
        for split, prints in fingerprints.by_split.items()
    }
    findings = [*checks.unreadable(fingerprints), *checks.copied(source, sound)]
    if HAS_HASHES:
        exact = {each.position for each in findings if each.position and each.problem in EXACT}
        findings += checks.nearly_copied(fingerprints, sound, exact, workers)
    findings += [*checks.odd(fingerprints), *checks.doubtful_classes(source)]
    if settings.checkpoint is not None:
        findings += _doubted_labels(settings, fingerprints, find_suspects)
    return fingerprints, ordered(findings)


def _doubted_labels(
    settings: Doctor, fingerprints: Fingerprints, find_suspects: FindSuspects
) -> Iterator[Finding]:
    total = sum(map(len, fingerprints.by_split.values()))
    with meter("judged", total) as shown:
        question = Question(
            weights=str(settings.checkpoint),
            data=settings.data,
            model=settings.model,
            task=settings.task,
            workers=settings.workers,
            advance=lambda images: shown.advance(Progress(images, 0)),
        )
        suspects = find_suspects(question)
    positions = {
        (split.name, shard, key): ImagePosition(split.name, row)
        for split in fingerprints.source.manifest.splits
        for row, (shard, key) in enumerate(fingerprints.names(split.name))
    }
    for suspect in suspects:
        position = positions[suspect.split, suspect.shard, suspect.key]
        reason = f"looks like {suspect.likely}"
        label, likely = fingerprints.label(position), suspect.likely
        yield Finding(LABEL, position, label, reason, RELABEL, likely, suspect.score)


def rows(fingerprints: Fingerprints, findings: Sequence[Finding]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of doctor.csv, its header first."""
    yield COLUMNS
    classes = fingerprints.source.manifest.classes
    for each in findings:
        split = each.position.split if each.position else ""
        shard, key = fingerprints.named(each.position) if each.position else ("", "")
        score = "" if each.score is None else f"{each.score:.3f}"
        name = classes[each.label]
        what_is = split, shard, key, name, each.problem
        yield tuple(map(as_cell, (*what_is, each.action, each.new_class, score, each.reason)))


def _print(
    settings: Doctor,
    fingerprints: Fingerprints,
    findings: Sequence[Finding],
    table_path: Path,
    page: Path,
) -> None:
    for fault in fingerprints.faults:
        say(f"error: {fault}")
    if not HAS_HASHES:
        say(f"near copies were not looked for; to find them, type: {install_command('doctor')}")
    counts = Counter((each.problem, each.action) for each in findings)
    lines = []
    for problem, meaning in PROBLEMS.items():
        total = sum(each.problem == problem for each in findings)
        if total:
            asked = [f"{counts[problem, action]:,}" for action in (DROP, RELABEL)]
            asked = ["" if number == "0" else number for number in asked]
            lines.append((problem, f"{total:,}", *asked, meaning))
    if lines:
        head = ("problem", "found", "to drop", "to relabel", "what it means")
        sys.stdout.write(table(head, lines, wrapped=head[-1:], numbers=head[1:4]))
    else:
        sys.stdout.write(clean(f"{settings.data}: nothing found") + "\n")
    sys.stdout.write(clean(f"{page}, {table_path}") + "\n")
    folder, _ = folder_and_version(settings.data)  # only the newest version can be changed
    data, csv = shlex.quote(folder), shlex.quote(str(table_path))
    for action in (DROP, RELABEL):
        if any(each.action == action for each in findings):
            sys.stdout.write(clean(f"to {action} them: {called('convert')} {action} {data} {csv}"))
            sys.stdout.write("\n")
