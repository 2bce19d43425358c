"""`rackrun doctor DATA [RUN]`: copies, odd images and wrong labels; doctor.csv and doctor.html.

cleanvision looks at the images, and, with a model, cleanlab at the labels. This file knows both
`convert`, which never imports torch, and `training`.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Annotated, ClassVar

from rackrun.commandline.options import Examples, Positional, Values
from rackrun.commandline.parser import parse
from rackrun.commands import called
from rackrun.convert.doctor.images import DROP, LABEL, PROBLEMS, RELABEL, Finding, Images, examined
from rackrun.convert.doctor.page import write_page
from rackrun.errors import MissingPackage, UsageError
from rackrun.runs import final_weights
from rackrun.shard_folder import folder_and_version
from rackrun.shards.open import open_source
from rackrun.tables import as_cell, table, write_table
from rackrun.terminal import clean, say

COLUMNS = (
    *("split", "shard", "key", "class", "problem", "action", "new_class", "score", "reason"),
)


@dataclass(frozen=True)
class Doctor:
    """Look for copies, odd images and, with a model, wrong labels in a data set.

    Nothing is changed: doctor.csv is the input of `convert drop` and `convert relabel`.
    """

    examples: ClassVar[Examples] = (
        ("{prog} data/shards", "look for copies and odd images"),
        ("{prog} data/shards runs/latest", "also look for labels that the model doubts"),
        ("{prog} http://server:8080/ --out look/", "of a served folder, into another folder"),
    )

    data: Positional[str]
    """Shard folder, or the http(s):// URL of one; for one of its versions: DATA@2."""
    checkpoint: Positional[Path | None] = None
    """A model trained on these classes: a run folder, its final.pt, or a checkpoint."""
    out: Annotated[Path, Values("FOLDER")] = Path()
    """Folder for doctor.html and doctor.csv; if you changed the old table, the new one is called
    doctor-2.csv."""
    model: Annotated[str, Values("NAME")] = ""
    """The model that the weights were trained with, if it is your own: `my_models:Net`."""
    task: Annotated[str, Values("FILE")] = ""
    """The task that the weights were trained for, if it is your own: `./my_task.py`."""


def main(args: Sequence[str]) -> int:
    """Look at a data set, write both files, and print what was found."""
    settings = parse(Doctor, called("doctor"), args)
    if not settings.out.is_dir():
        folder = shlex.quote(str(settings.out))
        raise UsageError(f"--out {settings.out}: no such folder; type: mkdir -p {folder}")
    if settings.checkpoint is not None:
        final_weights(settings.checkpoint)
    images = Images(open_source(settings.data))
    for package in ("cleanvision", "cleanlab"):
        if find_spec(package) is None:
            raise MissingPackage(package, "doctor")
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # cleanvision's bars; read once, by tqdm's import
    findings = [*_doubted_labels(settings, images), *examined(images)]
    gravity = list(PROBLEMS)
    findings.sort(key=lambda each: (gravity.index(each.problem), -each.score))
    table_path, page = _paths(settings.out)
    write_table(table_path, _rows(images, findings))
    write_page(page, images, findings, table_path)
    _print(settings, findings, table_path, page)
    return 0


def _doubted_labels(settings: Doctor, images: Images) -> Iterator[Finding]:
    if settings.checkpoint is None:
        return
    from rackrun.training.judge.labels import doubts, trained_on

    classes = images.source.manifest.classes
    weights = str(settings.checkpoint)
    trained = trained_on(classes, settings.data, weights, settings.model, settings.task)
    for image, likely, score in doubts(trained, images.labeled()):
        name = classes[likely]
        yield Finding(LABEL, image, RELABEL, f"looks like {name}", score, name)


def _paths(folder: Path) -> tuple[Path, Path]:
    """Return where table and page go: a table that a person has changed is never replaced."""
    for number in count(1):
        stem = f"doctor-{number}" if number > 1 else "doctor"
        table_path, page = folder / f"{stem}.csv", folder / f"{stem}.html"
        if not table_path.exists():
            break
        digest = sha256(table_path.read_bytes()).hexdigest()
        if page.exists() and digest.encode() in page.read_bytes():
            break
        say(f"{table_path}: kept, since it was changed after the doctor wrote it")
    return table_path, page


def _rows(images: Images, findings: Sequence[Finding]) -> Iterator[tuple[str, ...]]:
    yield COLUMNS
    for each in findings:
        number = each.image
        name = images.source.manifest.classes[images.label(number)]
        place = images.split(number), images.shard(number), images.key(number), name
        what = each.problem, each.action, each.new_class, f"{each.score:.3f}", each.reason
        yield tuple(map(as_cell, (*place, *what)))


def _print(settings: Doctor, findings: Sequence[Finding], table_path: Path, page: Path) -> None:
    counts = Counter(each.problem for each in findings)
    asked = Counter((each.problem, each.action) for each in findings)
    lines = []
    for problem in filter(counts.get, PROBLEMS):
        numbers = counts[problem], asked[problem, DROP], asked[problem, RELABEL]
        shown = (f"{number:,}" if number else "" for number in numbers)
        lines.append((problem, *shown, PROBLEMS[problem]))
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
