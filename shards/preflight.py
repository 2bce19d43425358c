"""Check that the ranks of this machine can read a data set: the preflight runs it on each host.

    python -m rackrun.shards.preflight DATA [--every-shard]

It reads the manifest and a byte of the first shard, or of every shard; of tars without an index,
the first block. It prints the data set's name and splits as JSON, and raises a Problem for what
cannot be read. Digests are compared where whole shards are read (shards/source.py).
"""

from __future__ import annotations

import json
import sys

from rackrun.commandline.program import run
from rackrun.data_location import PIPE, are_plain_tars, expanded, parts_of
from rackrun.errors import DataError
from rackrun.shards.http_source import HttpSource, Timeouts
from rackrun.shards.open import open_source
from rackrun.shards.source import Source
from rackrun.shards.tar_streams import opened
from rackrun.shards.writer import BLOCK

TIMEOUTS = Timeouts(stall_seconds=5.0, total_seconds=15.0, first_seconds=1.0)
"""Short, since a user waits for the answer and can launch again."""
MOST_SPLITS = 16


def main(args: list[str]) -> None:
    """Read the manifest, and a byte of the first shard or of all."""
    location, *every_shard = args
    if are_plain_tars(location):
        tars = expanded(location)
        for tar in tars if every_shard else tars[:1]:
            _read_a_block(tar)
        sys.stdout.write(json.dumps({"dataset": "tars", "splits": []}) + "\n")
        return
    sources = [_source(part) for part in parts_of(location)]
    for source in sources:
        shards = [shard for split in source.manifest.splits for shard in split.shards]
        for shard in shards if every_shard else shards[:1]:
            source.read(shard, 0, 1)
    manifest = sources[0].manifest
    names = [split.name for split in manifest.splits if split.shards][:MOST_SPLITS]
    sys.stdout.write(json.dumps({"dataset": manifest.dataset, "splits": names}) + "\n")


def _read_a_block(tar: str) -> None:
    if tar.startswith(PIPE):  # the command runs where it is read, not before
        return
    with opened(tar, TIMEOUTS.total_seconds) as stream:
        if len(stream.read(BLOCK)) < BLOCK:
            raise DataError(f"{tar}: not a tar: it is empty")


def _source(location: str) -> Source:
    if location.startswith(("http://", "https://")):
        return HttpSource(location, TIMEOUTS)
    return open_source(location)


if __name__ == "__main__":
    run(main)
