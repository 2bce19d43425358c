"""The files that a manifest lists: what a server gives away, and nothing else."""

import re
import shlex
from pathlib import Path
from typing import Any

from nginx.errors import FolderError
from rackrun.contract.files import MANIFEST_NAME
from rackrun.shapes import Misshapen, parsed_file

LARGEST_MANIFEST = 64 << 20  # bytes
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}(\.tar|\.index\.npy)")


def listed_names(folder: Path) -> list[str]:
    """Return the names of all shards and indexes, the shards first; FolderError for none."""
    path = folder / MANIFEST_NAME
    try:
        splits = parsed_file(path, dict[str, Any], LARGEST_MANIFEST)["splits"]
        names = [shard["name"] for split in splits for shard in split["shards"]]
        names += [split["index"] for split in splits if "index" in split]
        wrong = [name for name in names if not NAME.fullmatch(name)]
    except OSError as error:
        raise FolderError(f"{path}: cannot be read: {error.strerror}") from None
    except (Misshapen, KeyError, TypeError, AttributeError):
        raise FolderError(f"{path}: not the manifest of a data set; convert it again") from None
    if not names or wrong or len({name.lower() for name in names}) < len(names):
        why = "names that no server may give away" if names else "no shards in it"
        raise FolderError(f"{path}: {why}; convert it again")
    return names


def first_shard(folder: Path) -> str:
    """Return the name of the first shard; FolderError unless it lies in the folder itself."""
    name = listed_names(folder)[0]
    if (folder / name).is_symlink():
        target = shlex.quote(str((folder / name).resolve().parent))
        raise FolderError(
            f"{folder / name}: a link, and links are not followed; index the tars where they lie "
            f"({target}) and serve that folder"
        )
    if not (folder / name).is_file():
        raise FolderError(f"{folder / name}: is missing, so the folder cannot be served")
    return name


def as_map(names: list[str]) -> str:
    """Return the lines of nginx's `map` from each path to itself."""
    return "".join(f'"/{name}" "/{name}";\n' for name in (MANIFEST_NAME, *names))
