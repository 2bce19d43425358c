"""The version of its data that a run reads: the same on all ranks, from its start to its end.

A location such as data/shards is the newest version when a run begins, which the first rank names:
data/shards@1 also where there is no other one, for others may open the folder after an append. A
checkpoint has the digest of the version that it was trained on. A run that resumes finds it again
by that digest, whatever has been appended meanwhile.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING

from rackrun.contract.files import MANIFEST_NAME
from rackrun.data_location import SEPARATOR, are_plain_tars, parts_of
from rackrun.errors import Problem, UsageError
from rackrun.shard_folder import folder_and_version
from rackrun.shards.open import open_source
from rackrun.training.config import Config

if TYPE_CHECKING:
    from rackrun.training.ranks import Ranks
    from rackrun.training.run.resume import Earlier


LocationAndRemark = tuple[str, str]
"""The location of the version of a folder that a run reads, and a remark on it."""


def chosen(location: str, recorded: str) -> LocationAndRemark:
    """Return which version a location means to a run whose checkpoint has the digest `recorded`.

    That is empty for a new run. UsageError for another version than the checkpoint's. A folder
    without that digest is left as it is, to be refused with the checkpoint.
    """
    folder, typed = folder_and_version(location)
    named = open_source(location).manifest
    newest = open_source(folder).manifest if typed else named
    digests = (*newest.parents, newest.digest)
    if recorded not in digests:
        return f"{folder}@{named.number}", ""
    number = digests.index(recorded) + 1
    of_run = f"{folder}@{number}"
    if typed and number != typed:
        raise UsageError(
            f"--data {location}: the checkpoint's run is on version {number}; to continue, type"
            f" --data {of_run}, or start a run on version {typed} with --weights"
        )
    if number == newest.number:
        return of_run, ""
    remark = f"stays on version {number} of {folder}; to train on version {newest.number}, start a"
    return of_run, f"{remark} run with --weights"


def is_local_folder(location: str) -> bool:
    """Return whether a location is a finished folder of shards on this machine."""
    folder = Path(folder_and_version(location)[0])
    return location != "" and "://" not in location and (folder / MANIFEST_NAME).is_file()


def pinned(config: Config, earlier: Earlier | None, ranks: Ranks) -> tuple[Config, list[str]]:
    """Return the settings with the versions that all ranks read, as the first rank sees them.

    With them are remarks on versions. UsageError on all ranks if there is no such version.
    """
    if config.synthetic or not config.data or are_plain_tars(config.data):
        return config, []
    choices = ranks.on_first(partial(_chosen_of, config, earlier))
    located = replace(config, data=SEPARATOR.join(location for location, _ in choices))
    return located, [remark for _, remark in choices if remark]


def _chosen_of(config: Config, earlier: Earlier | None) -> list[LocationAndRemark]:
    recorded = map(str, earlier.table("data_versions").values()) if earlier else ()
    locations = parts_of(config.data)
    try:
        return [
            chosen(location, digest)
            for location, digest in zip(locations, chain(recorded, repeat("")), strict=False)
        ]
    except UsageError:
        raise
    except Problem:  # which each rank meets, too, when it opens the data
        return [(location, "") for location in locations]
