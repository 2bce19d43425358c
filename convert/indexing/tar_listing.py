"""The tars that a command line names, each with its split."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from rackrun.convert.readers.records import SPLITS, TEST, TRAIN, VAL
from rackrun.errors import UsageError
from rackrun.shapes import LARGEST_NUMBER
from rackrun.shards.index import ADOPTED_NAME
from rackrun.terminal import one_line
from rackrun.units import whole_number

LETTERS = re.compile(r"[a-z]+")
BRACES = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")
MOST = 1_000_000  # tars, as in a manifest


class ListedTar(NamedTuple):
    """A tar: its path (of one on a server, its name only), name and split."""

    path: Path
    name: str
    split: str


@dataclass(frozen=True)
class TarListing:
    """The tars to index."""

    tars: tuple[ListedTar, ...]
    folder: Path | None
    """The folder that holds all of them, if there is one."""
    url: str
    """The folder's URL; empty for files."""
    dataset: str


def list_tars(sources: tuple[str, ...], split: str, name: str, command: str) -> TarListing:
    """Return the tars of these folders, files or URLs; UsageError if that is not possible.

    `command` is what was typed, for a message that adds to it.
    """
    if split and split not in (TRAIN, VAL, TEST):
        raise UsageError(f"--split {split}: train, val and test are possible")
    locations = chain.from_iterable(map(_expanded, sources))
    expanded = list(islice(locations, MOST + 1))
    if len(expanded) > MOST:
        raise UsageError(f"{sources[0][:80]}: more than {MOST:,} tars; index them in parts")
    remote = [location for location in expanded if location.startswith(("http://", "https://"))]
    if remote and len(remote) < len(expanded):
        raise UsageError("some tars are here and some on a server; index them separately")
    paths = [Path(location.rpartition("/")[2]) for location in remote] or _files(expanded)
    folders = {location.rpartition("/")[0] + "/" for location in remote}
    if len(folders) > 1:
        raise UsageError(f"{', '.join(sorted(folders)[:2])}: index the tars of one URL at a time")
    if not split and (unnamed := next((path for path in paths if not _split_of(path)), None)):
        raise UsageError(
            f"{unnamed}: neither train, val nor test in its name or its folder's; if all tars are "
            f"for training, type: {command} --split train"
        )
    tars = tuple(ListedTar(path, path.name, split or _split_of(path)) for path in paths)
    checked = set[Path]()
    for path in paths:
        if not ADOPTED_NAME.fullmatch(path.name):
            raise UsageError(f"{path}: a name of letters, digits, _, - and . is needed")
        if path in checked:
            raise UsageError(f"{path}: is given twice")
        checked.add(path)
    parents = {tar.path.parent.resolve() for tar in tars}  # of links: not where these lead
    beside = parents.pop() if len(parents) == 1 and not remote else None
    return TarListing(tars, beside, folders.pop() if folders else "", _dataset(name, tars[0].name))


def _expanded(source: str) -> Iterator[str]:
    # Braces, as in {000..003}, expanded as by webdataset and shells.
    match = BRACES.search(source)
    if match is None:
        yield source
        return
    low, high = (whole_number(digits, LARGEST_NUMBER) for digits in match.groups())
    if low is None or high is None or not low <= high < low + MOST:
        shown = one_line(match[0])[:40]
        raise UsageError(f"{source[:80]}: {shown} is not a range of at most {MOST:,} numbers")
    head, tail = source[: match.start()], source[match.end() :]
    for number in range(low, high + 1):
        yield from _expanded(f"{head}{str(number).zfill(len(match[1]))}{tail}")


def _files(locations: list[str]) -> list[Path]:
    tars: list[Path] = []
    for source in map(Path, locations):
        if not source.exists():
            raise UsageError(f"{source}: there is no such file or folder{_of_hub(str(source))}")
        below = sorted(source.rglob("*.tar")) if source.is_dir() else [source]
        if not below or not all(path.is_file() for path in below):
            packed = source.is_dir() and [*source.rglob("*.tar.gz"), *source.rglob("*.tgz")]
            raise UsageError(
                f"{packed[0]}: a compressed tar, which cannot be read in place;"
                f" type: gunzip {shlex.quote(str(packed[0]))}"
                if packed
                else f"{source}: no tars there; give a folder with *.tar, tars, or URLs of tars"
            )
        tars += below
    return tars


def _of_hub(address: str) -> str:
    """Return what to type for a data set on the Hugging Face Hub; nothing for other places."""
    if not address.startswith("hf:/"):
        return ""
    name = "/".join(address.removeprefix("hf:").strip("/").removeprefix("datasets/").split("/")[:2])
    return f"; to fetch it, type: hf download --repo-type dataset {shlex.quote(name)}"


def _split_of(path: Path) -> str:
    parts = (*LETTERS.findall(path.name.lower()), path.parent.name.lower())
    return next((SPLITS[part] for part in parts if part in SPLITS), "")


def _dataset(name: str, first: str) -> str:
    # What precedes split and number in the name of the first tar, unless a name is given.
    stem = PurePosixPath(name or first).name.removesuffix(".tar")
    if not name:
        split = next(
            (m.start() for m in LETTERS.finditer(stem.lower()) if m[0] in SPLITS), len(stem)
        )
        stem = stem[:split] or stem
    return re.sub(r"[^A-Za-z0-9_]+", "_", stem).strip("_") or "dataset"
