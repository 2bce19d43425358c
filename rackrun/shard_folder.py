"""Check whether a path is a folder of shards; if not, name the command that makes one of it.

Standard library only: the launcher asks this before a run folder exists, and the ranks once more.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rackrun.commands import called
from rackrun.contract.files import MANIFEST_NAME

ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz")
TABLES = (".csv", ".tsv")
IMAGES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff")
MOST_NAMES = 1000  # to look at; a folder may have millions
VERSIONED = re.compile(r"(.+)@([1-9][0-9]{0,4})")


def folder_and_version(location: str) -> tuple[str, int]:
    """Return the folder or URL in a location such as `DATA@2`, and the version; 0: the newest."""
    match = VERSIONED.fullmatch(location)
    if not match:
        return location, 0
    folder, is_url = match[1], "://" in location
    if is_url and "/" not in folder.partition("://")[2]:  # the @ follows a user's name
        return location, 0
    if not is_url and (Path(location) / MANIFEST_NAME).exists():  # a folder whose name ends so
        return location, 0
    return folder, int(match[2])


def why_no_shards(location: str) -> str:
    """Return why shards cannot be read from a path, and what to type; empty if they can."""
    location = folder_and_version(location)[0]
    folder = Path(location)
    convert = f"{called('convert')} folder {shlex.quote(location)} OUT"
    if (folder / MANIFEST_NAME).exists():
        return ""
    if folder.is_file():
        return f"{location}: {_about_a_file(folder)}"
    if not folder.is_dir():
        return f"{location}: there is no such folder; to make one, type: {called('convert')} --help"
    if (folder / "shards" / MANIFEST_NAME).exists():
        return f"{location}: not a finished shard folder; did you mean {folder / 'shards'}?"
    names = {path.suffix.lower() for path in _sample(folder)}
    if names & set(IMAGES):
        return f"{location}: images, not shards; convert them: {convert}"
    reason = (
        f"{location}: not a finished shard folder ({MANIFEST_NAME} is missing); if a conversion was"
        f" interrupted, run the same {called('convert')} command again"
    )
    if ".tar" not in names:
        return reason
    index = f"{called('convert')} index {shlex.quote(location)}"
    return f"{reason}; for shards of another program, type: {index}"


def holds_images(folder: Path) -> bool:
    """Return whether a folder that is none of shards has images in it, or in its folders."""
    if (folder / MANIFEST_NAME).exists() or (folder / "shards" / MANIFEST_NAME).exists():
        return False
    return any(path.suffix.lower() in IMAGES for path in _sample(folder))


def why_no_splits(location: str, needed: Sequence[str], splits: Sequence[str]) -> str:
    """Return that data have no samples in a split that is needed; empty if they have."""
    absent = [repr(split) for split in needed if split not in splits]
    if not absent:
        return ""
    return f"{location}: no samples in the split {', '.join(absent)}; there are in: " + (
        ", ".join(splits) or "none"
    )


def _about_a_file(file: Path) -> str:
    if file.name == MANIFEST_NAME:
        return f"name the folder it is in: {file.parent}"
    kinds = {"folder": ARCHIVES, "csv": TABLES}
    kind = next((kind for kind, ends in kinds.items() if file.name.lower().endswith(ends)), "")
    if not kind:
        return f"a file, not a folder of shards; type: {called('convert')} --help"
    command = f"{called('convert')} {kind} {shlex.quote(str(file))} OUT"
    others = f"{called('convert')} --help shows those for other data"
    return f"a file, not a folder of shards; to convert it, type: {command}; {others}"


def _sample(folder: Path) -> Iterator[Path]:
    """Yield some files of a folder, and of the folders in it."""
    try:
        tops = list(itertools.islice(folder.iterdir(), MOST_NAMES))
        yield from tops
        for top in filter(Path.is_dir, tops):
            folders = (path for path in top.iterdir() if path.is_dir())
            for folder in (top, *itertools.islice(folders, 3)):  # train/cat/, as well as cat/
                yield from itertools.islice(folder.iterdir(), MOST_NAMES)
    except OSError:
        return  # what cannot be listed will be named when it is read
