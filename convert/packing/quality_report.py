"""The quality report: every odd file by name, what was found, and what was done with it."""

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path, PurePosixPath

from rackrun.atomic import write_whole
from rackrun.convert.images.info import KEPT, LEFT_OUT
from rackrun.convert.readers.records import ImageDefect, as_text
from rackrun.terminal import clean
from rackrun.units import first_few, plural

NAMED = 3  # files that the printed report names per kind
SUFFIXES = 5  # of files that are no images, the commonest ones


def save_report(path: Path, findings: list[ImageDefect], images: int) -> None:
    """Write the whole report as JSON; `images` are stored."""
    report = {
        "pictures": images,
        "left_out": sum(finding.kind in LEFT_OUT for finding in findings),
        "findings": [
            {
                "file": as_text(finding.name),
                "found": finding.kind,
                "detail": finding.detail,
                "done": "left out" if finding.kind in LEFT_OUT else "kept",
            }
            for finding in findings
        ],
    }
    write_whole(path, (json.dumps(report, indent=1) + "\n").encode())


def print_report(path: Path, findings: list[ImageDefect], images: int) -> None:
    """Print the report on a page: per kind how many, what was done, the first names."""
    stored = f"quality report: {plural(images, 'image')} stored, all of them decoded"
    lines = [stored, *report_lines(findings)]
    if findings:
        lines.append(f"  all names: {path}")
    sys.stdout.write("\n".join((*lines, "")))
    sys.stdout.flush()  # before what standard error says next, where both are one file


def report_lines(findings: list[ImageDefect]) -> list[str]:
    """Return a line per kind: what was done, how many, the first names."""
    names = defaultdict[str, list[str]](list)
    suffixes = Counter[str]()
    for name, kind, detail in findings:
        names[kind].append(clean(f"{name} ({detail})" if detail else name))
        if kind == "ignored":
            suffixes[clean(PurePosixPath(name).suffix.lower()) or "no suffix"] += 1
    common = ", ".join(f"{suffix} {count:,}" for suffix, count in suffixes.most_common(SUFFIXES))
    return [
        f"  {done}: {len(names[kind]):,} {text}{f' ({common})' if kind == 'ignored' else ''}: "
        f"{first_few(names[kind], NAMED)}"
        for done, kinds in (("left out", LEFT_OUT), ("kept", KEPT))
        for kind, text in kinds.items()
        if kind in names
    ]
