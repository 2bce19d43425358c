"""What other readers keep beside the shards: the formats of their indexes.

DALI      NAME.idx: a line per sample with extension, offset, size and name of each member (v1.2)
wids      DATASET-SPLIT.wids.json: the shards of a split with their counts
Energon   NAME.tar.idx: where each sample begins and the last one ends, 64 bits each;
          .nv-meta/: counts, splits, and what the members are
"""

import contextlib
import json
import struct
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from convert.readers.names import is_meta
from convert.readers.records import as_text
from convert.readers.tars import BLOCK, Tar
from rackrun.errors import DataError
from rackrun.terminal import clean
from shards.index import Manifest, Split

DALI_VERSION = "v1.2"
META = ".nv-meta"
ENERGON_BYTES = 8  # of an entry of its index


class SampleMember(NamedTuple):
    """A member of a sample; the key ends at the first dot of the file's name, for these readers."""

    key: str
    extension: str
    start: int  # of its headers in the tar
    offset: int  # of its content
    size: int
    name: str


def samples_of(tar: Tar) -> list[list[SampleMember]]:
    """Return the members of each sample of a tar; DataError for a name that no index can hold."""
    return [list(group) for _, group in groupby(_members(tar), lambda member: member.key)]


def _members(tar: Tar) -> Iterator[SampleMember]:
    end = 0
    for member in tar.members():
        start, end = end, -(-(member.offset + member.size) // BLOCK) * BLOCK
        folder, slash, file = member.name.rpartition("/")
        stem, dot, extension = file.partition(".")
        if not dot or not stem or is_meta(file):
            continue
        if not member.name.isascii() or not member.name.isprintable() or " " in member.name:
            raise DataError(
                clean(f"{tar.path}: {as_text(member.name)}: a blank or a letter that is not ASCII")
                + ", which DALI's index cannot hold; leave out --sidecars"
            )
        key = folder + slash + stem
        yield SampleMember(key, extension, start, member.offset, member.size, member.name)


def dali_index(samples: list[list[SampleMember]]) -> bytes:
    """Return the index of a tar for DALI's `readers.webdataset`."""
    lines = (
        " ".join(f"{each.extension} {each.offset} {each.size} {each.name}" for each in members)
        for members in samples
    )
    return "\n".join((f"{DALI_VERSION} {len(samples)}", *lines, "")).encode()


def energon_index(samples: list[list[SampleMember]]) -> bytes:
    """Return the index of a tar for Energon."""
    starts = [members[0].start for members in samples]
    last = samples[-1][-1]
    end = -(-(last.offset + last.size) // BLOCK) * BLOCK
    return struct.pack(f"<{len(starts) + 1}Q", *starts, end)


def wids_list(dataset: str, split: Split) -> bytes:
    """Return the list of a split's shards for `wids.ShardListDataset`."""
    shards = [
        {"url": shard.name, "nsamples": shard.samples, "filesize": shard.bytes}
        for shard in split.shards
    ]
    head = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "name": f"{dataset}-{split.name}"}
    return _text(head | {"shardlist": shards})


def energon_files(manifest: Manifest, counts: dict[str, int]) -> dict[str, bytes]:
    """Return the files of .nv-meta by name; JSON is YAML. `counts` are the samples of each tar."""
    parts = {split.name: [shard.name for shard in split.shards] for split in manifest.splits}
    sample = {"__module__": "megatron.energon", "__class__": "ImageClassificationSample"}
    fields = {"image": "jpg", "label": "cls"}
    return {
        f"{META}/.info.json": _text({"shard_counts": counts}),
        f"{META}/split.yaml": _text({"split_parts": parts, "exclude": []}),
        f"{META}/dataset.yaml": _text({"sample_type": sample, "field_map": fields}),
    }


def _text(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def sidecar_names(manifest: Manifest) -> set[str]:
    """Return the names of all files for other readers, whether they are there or not."""
    shards = [shard.name for split in manifest.splits for shard in split.shards]
    wids = {f"{manifest.dataset}-{split.name}.wids.json" for split in manifest.splits}
    indexes = {f"{name.removesuffix('.tar')}.idx" for name in shards}
    return wids | indexes | {f"{name}.idx" for name in shards} | set(energon_files(manifest, {}))


def remove_sidecars(folder: Path, manifest: Manifest) -> None:
    """Remove those that the manifest lists as ours."""
    if not manifest.sidecars:
        return
    for name in sidecar_names(manifest):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty: Energon's own files are in it
        (folder / META).rmdir()
