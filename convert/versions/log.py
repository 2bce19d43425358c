"""The versions of a shard folder, a line each."""

import json
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from rackrun.commandline.options import Examples, Positional
from rackrun.shards.index import Manifest, Shard
from rackrun.shards.open import sources_of
from rackrun.terminal import clean
from rackrun.units import plural


@dataclass(frozen=True)
class Log:
    """List the versions of a shard folder, the newest first."""

    examples: ClassVar[Examples] = (("{prog} data/shards", "what was added, dropped, relabelled"),)

    location: Positional[str]
    """Shard folder, or the http(s):// URL of one."""
    json: bool = False
    """Print JSON: a list of version, sha256, samples, classes, change, and bytes written for it."""

    def run(self) -> None:
        """Print a line per version that is there; the numbers of others."""
        manifests = [source.manifest for source in sources_of(self.location)]
        rows = [
            _row(manifest, _shards(before) if before else set())
            for manifest, before in zip(manifests, [*manifests[1:], None], strict=True)
        ]
        if self.json:
            sys.stdout.write(json.dumps(rows, indent=2) + "\n")
            return
        lines = [_line(row) for row in rows]
        missing = set(range(1, manifests[0].number + 1)) - {row["version"] for row in rows}
        if missing and len(rows) > 1:
            lines.append(f"not here any more: {', '.join(map(str, sorted(missing)))}")
        sys.stdout.write("".join(f"{clean(line)}\n" for line in lines))


def _shards(manifest: Manifest) -> set[Shard]:
    return {shard for split in manifest.splits for shard in split.shards}


def _row(manifest: Manifest, before: set[Shard]) -> dict[str, Any]:
    return {
        "version": manifest.number,
        "sha256": manifest.digest,
        "samples": sum(split.samples for split in manifest.splits),
        "classes": len(manifest.classes),
        "change": manifest.change,
        "bytes": sum(shard.bytes for shard in _shards(manifest) - before),
    }


def _line(row: dict[str, Any]) -> str:
    changes = ", ".join(f"{count:,} {what}" for what, count in row["change"].items())
    samples = f"{plural(row['samples'], 'sample')} in {plural(row['classes'], 'class', 'classes')}"
    written = f"{row['bytes'] / 1e6:,.1f} MB written"
    what = changes or "converted"
    return f"{row['version']:>4}  {row['sha256'][:12]}  {samples}: {what}; {written}"
