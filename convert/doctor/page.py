"""doctor.html: the findings with their pictures, as one file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rackrun.atomic import write_whole
from rackrun.convert.doctor.checks import DROP, PROBLEMS, RELABEL, Finding
from rackrun.convert.doctor.fingerprints import UNREADABLE, Fingerprints, ImagePosition, opened
from rackrun.errors import DataError
from rackrun.run_report.template import data_url, rendered
from rackrun.shards.resize import in_mode
from rackrun.terminal import one_line

MOST_SHOWN = 60  # findings of a problem; doctor.csv has them all
PICTURE = 160  # pixels of the longer side


def write_page(
    path: Path, fingerprints: Fingerprints, findings: Sequence[Finding], table: Path
) -> None:
    """Write the page, whole or not at all, with the digest of the table that belongs to it."""
    sections = []
    for problem, meaning in PROBLEMS.items():
        of_problem = [each for each in findings if each.problem == problem]
        if of_problem:
            shown = [_shown(fingerprints, each) for each in of_problem[:MOST_SHOWN]]
            sections.append(
                {"title": problem, "meaning": meaning, "count": len(of_problem), "shown": shown}
            )
    manifest = fingerprints.source.manifest
    counts = {split.name: split.samples for split in manifest.splits}
    page = rendered(
        "doctor.html",
        name=one_line(fingerprints.source.location),
        headlines=[
            (f"{sum(counts.values()):,}", "images in " + ", ".join(counts)),
            (f"{len(manifest.classes):,}", "classes"),
            (f"{sum(each.action == DROP for each in findings):,}", "to drop"),
            (f"{sum(each.action == RELABEL for each in findings):,}", "to relabel"),
        ],
        sections=sections,
        table=one_line(table.name),
        digest=_digest(table),
    )
    write_whole(path, page.encode())


def is_unchanged(table: Path, page: Path) -> bool:
    """Return True if a table is still the one that its page was written with."""
    return page.exists() and _digest(table).encode() in page.read_bytes()


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def _shown(fingerprints: Fingerprints, finding: Finding) -> dict[str, Any]:
    pictures = [
        _picture(fingerprints, position)
        for position in (finding.position, finding.other)
        if position
    ]
    name = fingerprints.source.manifest.classes[finding.label]
    where = (
        f"{finding.position.split}: {fingerprints.named(finding.position).key}"
        if finding.position
        else ""
    )
    return {
        "pictures": [picture for picture in pictures if picture],
        "class": one_line(name),
        "where": one_line(where),
        "reason": one_line(finding.reason),
        "score": "" if finding.score in (None, 1.0) else f"{finding.score:.3f}",
        "action": finding.action,
    }


def _picture(fingerprints: Fingerprints, position: ImagePosition) -> str:
    source = fingerprints.source
    row = source.index(position.split)[position.row]
    shard = source.manifest.split(position.split).shards[int(row["shard"])]
    try:
        data = bytes(source.read(shard, int(row["image_offset"]), int(row["image_length"])))
        image = in_mode(opened(data, PICTURE), "RGB")
    except (*UNREADABLE, DataError):
        return ""
    image.thumbnail((PICTURE, PICTURE), Image.Resampling.BILINEAR)
    return data_url(np.asarray(image))
