"""The versions of a shard folder: a chain of manifests, each of which names all before it.

`dataset.json` is the newest; `dataset.v1.json` and so on are the manifests that it has replaced,
byte for byte. A manifest is believed only if its digest is the one that the newest has for its
number, and if it names the same versions before it: a chain without a circle or a fork.
"""

import re
from collections.abc import Callable

from rackrun.commands import called
from rackrun.contract.files import MANIFEST_NAME
from rackrun.errors import DataError, Unavailable, UsageError
from shards.index import LARGEST_MANIFEST, Manifest, manifest_name

EARLIER = re.compile(r"dataset\.v[0-9]+\.json")

ReadFile = Callable[[str, int], bytes]
"""Returns a file of the folder by its name, up to that many bytes."""


class MissingVersion(DataError):
    """A version whose manifest is not there any more: `prune` removes versions."""


def is_manifest(name: str) -> bool:
    """Return True for the name of the manifest of any version."""
    return name == MANIFEST_NAME or EARLIER.fullmatch(name) is not None


def read_version(newest: Manifest, number: int, read_file: ReadFile, folder: str) -> Manifest:
    """Return the manifest of a version; UsageError if there is none of that number.

    MissingVersion if its file is not there, DataError if it is not the one that the newest version
    follows from.
    """
    if number == newest.number:
        return newest
    log = f"type: {called('convert')} log {folder}"
    if number > newest.number:
        raise UsageError(f"{folder}: no version {number}; the newest is {newest.number}; {log}")
    name = manifest_name(number)
    try:
        text = read_file(name, LARGEST_MANIFEST)
    except Unavailable:
        raise
    except DataError as error:
        why = f"version {number} may have been pruned; {log}"
        raise MissingVersion(f"{error}; {why}") from None
    manifest = Manifest.parse(text, f"{folder.rstrip('/')}/{name}")
    expected = newest.parents[: number - 1], newest.parents[number - 1]
    if (manifest.parents, manifest.digest) != expected:
        raise DataError(
            f"{folder.rstrip('/')}/{name}: not the version {number} from which the newest one was "
            "made: its SHA-256 differs; copy it from where the folder was made"
        )
    return manifest
