"""doctor.html: the findings with their pictures, as one file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rackrun.atomic import write_whole
from rackrun.convert.doctor.images import DROP, PROBLEMS, RELABEL, Finding, Images
from rackrun.run_report.template import data_url, rendered

MOST_SHOWN = 60  # findings of a problem; doctor.csv has them all
PICTURE = 160  # pixels of the longer side


def write_page(path: Path, images: Images, findings: Sequence[Finding], table: Path) -> None:
    """Write the page, whole or not at all, with the digest of the table that belongs to it."""
    sections = []
    for problem, meaning in PROBLEMS.items():
        found = [each for each in findings if each.problem == problem]
        if found:
            shown = [_shown(images, each) for each in found[:MOST_SHOWN]]
            sections.append(
                {"title": problem, "meaning": meaning, "count": len(found), "shown": shown}
            )
    manifest = images.source.manifest
    splits = ", ".join(split.name for split in manifest.splits)
    page = rendered(
        "doctor.html",
        {
            "name": images.source.location,
            "headlines": [
                (f"{len(images):,}", f"images in {splits}"),
                (f"{len(manifest.classes):,}", "classes"),
                (f"{sum(each.action == DROP for each in findings):,}", "to drop"),
                (f"{sum(each.action == RELABEL for each in findings):,}", "to relabel"),
            ],
            "sections": sections,
            "table": table.name,
            "digest": sha256(table.read_bytes()).hexdigest(),
        },
    )
    write_whole(path, page.encode())


def _shown(images: Images, finding: Finding) -> dict[str, Any]:
    both = [number for number in (finding.image, finding.other) if number is not None]
    name = images.source.manifest.classes[images.label(finding.image)]
    return {
        "pictures": [_picture(images, each) for each in both if each not in images.damaged],
        "class": name,
        "where": f"{images.split(finding.image)}: {images.key(finding.image)}",
        "reason": finding.reason,
        "score": f"{finding.score:.3f}" if finding.score < 1 else "",
        "action": finding.action,
    }


def _picture(images: Images, number: int) -> str:
    image = images[number][0].convert("RGB")
    image.thumbnail((PICTURE, PICTURE), Image.Resampling.BILINEAR)
    return data_url(np.asarray(image))
