"""The result of a shard, kept beside the plan until the folder is complete."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from convert.packing.output_folder import Target
from convert.packing.plan import PlannedShard, ShardPlan
from convert.readers.records import ImageDefect
from rackrun.atomic import write_whole
from shards.index import Shard


@dataclass
class ShardResult:
    """A written shard, its rows of the index and its lines of the quality report."""

    shard: Shard
    rows: bytes
    findings: list[ImageDefect] = field(default_factory=list)

    @property
    def is_short(self) -> bool:
        """Return True if an image is missing that should have been there."""
        return any(finding.is_loss for finding in self.findings)

    def save(self, path: Path, plan: ShardPlan) -> None:
        """Write it: a line of JSON, then the rows as the index has them."""
        head = {"plan": plan.digest, "shard": asdict(self.shard), "findings": self.findings}
        write_whole(path, json.dumps(head).encode() + b"\n" + self.rows)


def finished(target: Target, plan: ShardPlan, shard: PlannedShard) -> ShardResult | None:
    """Read the result of a shard; None unless it was written whole, for this very plan."""
    path, tar = target.done(shard.name), target.tar(shard.name)
    if not path.exists() or not tar.exists():
        return None
    head, _, rows = path.read_bytes().partition(b"\n")
    try:
        fields = json.loads(head)
        written = Shard(**fields["shard"])
        findings = [ImageDefect(*finding) for finding in fields["findings"]]
        is_whole = fields["plan"] == plan.digest and tar.stat().st_size == written.bytes
    except (ValueError, KeyError, TypeError):
        return None
    return ShardResult(written, rows, findings) if is_whole else None
