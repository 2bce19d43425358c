"""The version of its data that a run reads: the same on all ranks, from its start to its end.

A location such as data/shards is the newest version when a run begins, which the first rank names:
data/shards@1 also where there is no other one, for others may open the folder after an append. A
checkpoint has the digest of the version that it was trained on. A run that resumes finds it again
by that digest, whatever has been appended meanwhile. With --newer-data it goes on with a later
version, from the beginning of the epoch that the checkpoint is in; the last layer grows with the
class table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rackrun.contract.files import MANIFEST_NAME
from rackrun.errors import Problem, SaveError, UsageError
from rackrun.shard_folder import folder_and_version
from shards.open import open_source
from training.config import Config
from training.data.mixture import weights_in
from training.settings.data import DataSettings

if TYPE_CHECKING:
    from torch import Tensor

    from training.ranks import Ranks
    from training.run.resume import Earlier
    from training.state import TrainingState

EXTRA = "--extra-data"


@dataclass(frozen=True)
class FolderVersion:
    """The version of a folder that a run reads."""

    location: str
    remark: str = ""
    moves: bool = False
    """Whether it is a later one than that of the checkpoint."""


def chosen(location: str, recorded: str, newer: bool) -> FolderVersion:
    """Return which version a location means to a run whose checkpoint has the digest `recorded`.

    That is empty for a new run. UsageError for another version than the checkpoint's unless it is a
    later one and `newer` is true. A folder without that digest is left as it is, to be refused with
    the checkpoint.
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
    if newer and number < named.number:
        remark = f"goes on with version {named.number} of {folder} instead of {number}"
        return FolderVersion(at(named.number), remark, moves=True)
    if typed and number != typed:
        hint = "add --newer-data" if number < typed else f"type --data {folder}@{number}"
        raise UsageError(
            f"--data {location}: the checkpoint's run is on version {number}; to go on, {hint}"
        )
    remark = f"stays on version {number} of {folder}; to go on with version {newest.number}, add"
    return FolderVersion(at(number), f"{remark} --newer-data" if number < newest.number else "")


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
    moves: bool = False


def pinned(config: Config, earlier: Earlier | None, ranks: Ranks) -> PinnedData:
    """Return the settings with the versions that all ranks read, as the first rank sees them.

    UsageError on all ranks if there is no such version. Attempts after a failure stay on theirs.
    """
    if config.synthetic or not config.data:
        return PinnedData(config)
    chooses = ranks.first or ranks.world == 1  # alone: an elastic run's ranks have no first one yet
    payload = json.dumps(_chosen_of(config, earlier)).encode() if chooses else None
    choice = json.loads(ranks.broadcast_bytes(payload, 0))
    if choice["problem"]:
        raise UsageError(choice["problem"])
    located = with_locations(config, choice["locations"])
    return PinnedData(located, tuple(choice["remarks"]), choice["moves"])


def _chosen_of(config: Config, earlier: Earlier | None) -> dict[str, Any]:
    # Plain data, which the first rank sends to the others.
    recorded = chain(recorded_digests(earlier.content) if earlier else [], repeat(""))
    attempts = config.earlier_attempts.split(",")
    is_attempt = earlier is not None and str(earlier.path.parents[1]) in attempts
    newer = config.newer_data and not is_attempt
    try:
        choices = [
            chosen(location, digest, newer)
            for location, digest in zip(locations(config), recorded, strict=False)
        ]
    except UsageError as problem:
        return {"problem": str(problem)}
    except Problem:  # which each rank meets, too, when it opens the data
        choices = [FolderVersion(location) for location in locations(config)]
    return {
        "problem": "",
        "locations": [choice.location for choice in choices],
        "remarks": [choice.remark for choice in choices if choice.remark],
        "moves": any(choice.moves for choice in choices),
    }


def locations(config: DataSettings) -> list[str]:
    """Return the folders of the settings: that of --data, and those of --extra-data."""
    return [config.data, *weights_in(EXTRA, config.extra_data)]


def with_locations(config: Config, folders: Sequence[str]) -> Config:
    """Return the settings with these folders in place of theirs."""
    if list(folders) == locations(config):
        return config
    weights = weights_in(EXTRA, config.extra_data).values()
    extra = ",".join(f"{folder}={w:g}" for folder, w in zip(folders[1:], weights, strict=True))
    return replace(config, data=folders[0], extra_data=extra)


def at_recorded(config: Config, content: Mapping[str, Any]) -> Config:
    """Return the settings with the versions that a run has recorded, where they are there."""
    digests = chain(recorded_digests(content), repeat(""))
    pairs = zip(locations(config), digests, strict=False)
    return with_locations(config, [chosen(each, digest, False).location for each, digest in pairs])


def move(
    content: dict[str, Any],
    identity: Mapping[str, Any],
    state: TrainingState,
    classes: Sequence[str],
    heads: Sequence[str],
) -> None:
    """Make a checkpoint of an earlier version one of this run, at the beginning of its epoch.

    `heads` are the layers with an output for each class. SaveError if the class tables differ in
    more than that this one is longer.
    """
    from training.layers import grown_tensors  # the check of a task reads names here, without torch

    before = content.get("classes")
    if not isinstance(before, list) or list(classes[: len(before)]) != before:
        raise SaveError("--newer-data: the classes of the checkpoint have other numbers here")
    saved, tensors = content["state"], state.model.state_dict()
    saved["model"] = grown_tensors(saved["model"], tensors, heads)
    if saved["average"]:
        saved["average"] = grown_tensors(saved["average"], tensors, heads)
    _grow_moments(saved["optimizer"]["state"], state)
    saved["step"] = saved["epoch"] * identity["steps per epoch"]
    lr_factor = saved["improvement"]["lr_factor"]
    saved["improvement"] = asdict(type(state.improvement)(lr_factor=lr_factor))
    names = ("data", "steps per epoch")
    content["identity"] |= {name: identity[name] for name in names}
    content["identity"]["tensors"] = described_tensors(saved["model"])
    content["classes"] = list(classes)


def described_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return type and shape of each tensor as text."""
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, tensor in tensors.items()
    }


def _grow_moments(saved: dict[int, dict[str, Any]], state: TrainingState) -> None:
    # The optimizer's averages get rows for new classes, which begin at zero.
    import torch

    from training.layers import grown, may_grow

    weights = [weight for group in state.optimizer.param_groups for weight in group["params"]]
    for number, weight in enumerate(weights):
        for name, value in saved.get(number, {}).items():
            if isinstance(value, torch.Tensor) and may_grow(value, weight):
                saved[number][name] = grown(value, torch.zeros_like(weight))
