"""The quality report: every odd file by name, what was found, and what was done with it."""

import json
import sys
from collections import defaultdict
from pathlib import Path

from convert.image_info import KEPT, LEFT_OUT
from convert.readers.records import ImageDefect, as_text
from rackrun.atomic import write_whole
from rackrun.terminal import clean

NAMED = 3  # files that the printed report names per kind


def save_report(path: Path, found: list[ImageDefect], pictures: int, check: str) -> None:
    """Write the whole report as JSON; `pictures` are in the shards, `check` says how tested."""
    report = {
        "pictures": pictures,
        "check": check,
        "left_out": sum(finding.kind in LEFT_OUT for finding in found),
        "findings": [
            {
                "file": as_text(finding.name),
                "found": finding.kind,
                "detail": finding.detail,
                "done": "left out" if finding.kind in LEFT_OUT else "kept",
            }
            for finding in found
        ],
    }
    write_whole(path, (json.dumps(report, indent=1) + "\n").encode())


def print_report(path: Path, found: list[ImageDefect], pictures: int, check: str) -> None:
    """The report on a page: per kind how many, what was done, the first names."""
    by_kind = defaultdict(list)
    for finding in found:
        by_kind[finding.kind].append(finding)
    sound = "whole in structure" if check == "structure" else "decoded without an error"
    lines = [f"quality report: {pictures:,} pictures stored, {sound}"]
    for done, kinds in (("left out", LEFT_OUT), ("kept", KEPT)):
        lines += [
            f"  {done}: {_line(by_kind[k], says)}" for k, says in kinds.items() if k in by_kind
        ]
    if found:
        lines.append(f"  all names: {path}")
    sys.stdout.write("\n".join((*lines, "")))


def _line(found: list[ImageDefect], says: str) -> str:
    names = ", ".join(_printable(finding) for finding in found[:NAMED])
    more = f" and {len(found) - NAMED:,} more" if len(found) > NAMED else ""
    return f"{len(found):,} {says}: {names}{more}"


def _printable(finding: ImageDefect) -> str:
    """A name as it may be shown on a terminal, whatever the archive calls its files."""
    return clean(f"{finding.name} ({finding.detail})" if finding.detail else finding.name)
