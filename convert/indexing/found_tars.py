"""The tars that a command line names, each with its split."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from convert.packing.plan import SPLITS, TEST, TRAIN, VAL
from rackrun.errors import UsageError
from rackrun.shapes import LARGEST_NUMBER
from rackrun.terminal import one_line
from rackrun.units import whole_number
from shards.index import ADOPTED_NAME

WORD = re.compile(r"[a-z]+")
BRACES = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")
MOST = 1_000_000  # tars, as in a manifest


class FoundTar(NamedTuple):
    """A tar: its place (of one on a server, its name only), name and split."""

    path: Path
    name: str
    split: str


@dataclass(frozen=True)
class FoundTars:
    """The tars to index."""

    tars: tuple[FoundTar, ...]
    folder: Path | None
    """The folder that holds all of them, if there is one."""
    url: str
    """The folder's URL; empty for files."""
    dataset: str


def found_tars(sources: tuple[str, ...], split: str, name: str) -> FoundTars:
    """Return the tars of these folders, files or URLs; UsageError if that is not possible."""
    if split and split not in (TRAIN, VAL, TEST):
        raise UsageError(f"--split {split}: train, val and test are possible")
    places = chain.from_iterable(map(_expanded, sources))
    expanded = list(islice(places, MOST + 1))
    if len(expanded) > MOST:
        raise UsageError(f"{sources[0][:80]}: more than {MOST:,} tars; index them in parts")
    remote = [place for place in expanded if place.startswith(("http://", "https://"))]
    if remote and len(remote) < len(expanded):
        raise UsageError("some tars lie here and some on a server; index them apart")
    paths = [Path(place.rpartition("/")[2]) for place in remote] or _files(expanded)
    folders = {place.rpartition("/")[0] + "/" for place in remote}
    if len(folders) > 1:
        raise UsageError(f"{', '.join(sorted(folders)[:2])}: index the tars of one URL at a time")
    tars = tuple(FoundTar(path, path.name, split or _split_of(path)) for path in paths)
    _check_names(tars)
    parents = {tar.path.resolve().parent for tar in tars}
    beside = parents.pop() if len(parents) == 1 and not remote else None
    return FoundTars(tars, beside, folders.pop() if folders else "", _dataset(name, tars[0].name))


def _expanded(source: str) -> Iterator[str]:
    """Yield the names that braces expand to, as webdataset and shells expand them."""
    match = BRACES.search(source)
    if match is None:
        yield source
        return
    low, high = (whole_number(digits, LARGEST_NUMBER) for digits in match.groups())
    if low is None or high is None or not low <= high < low + MOST:
        shown = one_line(match[0])[:40]
        raise UsageError(f"{source[:80]}: {shown} is no range of at most {MOST:,} numbers")
    head, tail = source[: match.start()], source[match.end() :]
    for number in range(low, high + 1):
        yield from _expanded(f"{head}{str(number).zfill(len(match[1]))}{tail}")


def _files(places: list[str]) -> list[Path]:
    """Return the tars that these paths name, and those below folders, sorted."""
    found: list[Path] = []
    for place in map(Path, places):
        if not place.exists():
            raise UsageError(f"{place}: there is no such file or folder")
        below = sorted(place.rglob("*.tar")) if place.is_dir() else [place]
        if not below or not all(path.is_file() for path in below):
            packed = place.is_dir() and [*place.rglob("*.tar.gz"), *place.rglob("*.tgz")]
            raise UsageError(
                f"{packed[0]}: a compressed tar, which cannot be read in place;"
                f" type: gunzip {shlex.quote(str(packed[0]))}"
                if packed
                else f"{place}: no tars there; give a folder with *.tar, tars, or URLs of tars"
            )
        found += below
    return found


def _split_of(path: Path) -> str:
    """Return the split in the name of a tar or of its folder; UsageError if none does."""
    for word in (*WORD.findall(path.name.lower()), path.parent.name.lower()):
        if word in SPLITS:
            return SPLITS[word]
    raise UsageError(
        f"{path}: neither train, val nor test in its name or its folder's; add --split train, or "
        "rename it"
    )


def _check_names(tars: tuple[FoundTar, ...]) -> None:
    seen = set[Path]()
    for tar in tars:
        if not ADOPTED_NAME.fullmatch(tar.name):
            raise UsageError(f"{tar.path}: a name of letters, digits, _, - and . is needed")
        if tar.path in seen:
            raise UsageError(f"{tar.path}: is given twice")
        seen.add(tar.path)


def _dataset(name: str, first: str) -> str:
    """Return the name of the data set: as given, or what precedes split and number."""
    stem = PurePosixPath(name or first).name.removesuffix(".tar")
    if not name:
        split = next((m.start() for m in WORD.finditer(stem.lower()) if m[0] in SPLITS), len(stem))
        stem = stem[:split] or stem
    return re.sub(r"[^A-Za-z0-9_]+", "_", stem).strip("_") or "dataset"
