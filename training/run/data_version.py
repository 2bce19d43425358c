"""The version of its data that a run reads: the same on all ranks, from its start to its end.

A location such as data/shards is the newest version when a run begins, which the first rank names:
data/shards@1 also where there is no other one, for others may open the folder after an append. A
checkpoint has the digest of the version that it was trained on. A run that resumes finds it again
by that digest, whatever has been appended meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rackrun.contract.files import MANIFEST_NAME
from rackrun.data_location import SEPARATOR, are_plain_tars, parts_of
from rackrun.errors import Problem, UsageError
from rackrun.shard_folder import folder_and_version
from rackrun.shards.open import open_source
from rackrun.training.config import Config

if TYPE_CHECKING:
    from torch import Tensor

    from rackrun.training.ranks import Ranks
    from rackrun.training.run.resume import Earlier


@dataclass(frozen=True)
class FolderVersion:
    """The version of a folder that a run reads."""

    location: str
    remark: str = ""


def chosen(location: str, recorded: str) -> FolderVersion:
    """Return which version a location means to a run whose checkpoint has the digest `recorded`.

    That is empty for a new run. UsageError for another version than the checkpoint's. A folder
    without that digest is left as it is, to be refused with the checkpoint.
    """
    folder, typed = folder_and_version(location)
    named = open_source(location).manifest
    newest = open_source(folder).manifest if typed else named
    digests = (*newest.parents, newest.digest)

    def at(number: int) -> str:
        return f"{folder}@{number}"

    if recorded not in digests:
        return FolderVersion(at(named.number))
    number = digests.index(recorded) + 1
    if typed and number != typed:
        raise UsageError(
            f"--data {location}: the checkpoint's run is on version {number}; to go on, type --data"
            f" {at(number)}, or start a run on version {typed} with --weights"
        )
    if number == newest.number:
        return FolderVersion(at(number))
    remark = f"stays on version {number} of {folder}; to train on version {newest.number}, start a"
    return FolderVersion(at(number), f"{remark} run with --weights")


def is_local_folder(location: str) -> bool:
    """Return whether a location is a finished folder of shards on this machine."""
    folder = Path(folder_and_version(location)[0])
    return location != "" and "://" not in location and (folder / MANIFEST_NAME).is_file()


def recorded_digests(content: Mapping[str, Any]) -> list[str]:
    """Return the digests of the folders that a run was trained on, as it has recorded them."""
    versions = content.get("data_versions")
    return [str(digest) for digest in versions.values()] if isinstance(versions, Mapping) else []


@dataclass(frozen=True)
class PinnedData:
    """Settings whose locations name versions."""

    config: Config
    remarks: tuple[str, ...] = ()


def pinned(config: Config, earlier: Earlier | None, ranks: Ranks) -> PinnedData:
    """Return the settings with the versions that all ranks read, as the first rank sees them.

    UsageError on all ranks if there is no such version.
    """
    if config.synthetic or not config.data or are_plain_tars(config.data):
        return PinnedData(config)
    payload = json.dumps(_chosen_of(config, earlier)).encode() if ranks.first else None
    choice = json.loads(ranks.broadcast_bytes(payload, 0))
    if choice["problem"]:
        raise UsageError(choice["problem"])
    located = replace(config, data=SEPARATOR.join(choice["locations"]))
    return PinnedData(located, tuple(choice["remarks"]))


def _chosen_of(config: Config, earlier: Earlier | None) -> dict[str, Any]:
    # Plain data, which the first rank sends to the others.
    recorded = chain(recorded_digests(earlier.content) if earlier else [], repeat(""))
    try:
        choices = [
            chosen(location, digest)
            for location, digest in zip(parts_of(config.data), recorded, strict=False)
        ]
    except UsageError as problem:
        return {"problem": str(problem)}
    except Problem:  # which each rank meets, too, when it opens the data
        choices = [FolderVersion(location) for location in parts_of(config.data)]
    return {
        "problem": "",
        "locations": [choice.location for choice in choices],
        "remarks": [choice.remark for choice in choices if choice.remark],
    }


def described_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return type and shape of each tensor as text."""
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, tensor in tensors.items()
    }
