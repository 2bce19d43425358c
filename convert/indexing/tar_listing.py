"""The tars that a command line names, each with its split."""

import re
import shlex
from collections import Counter
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path, PurePosixPath

from braceexpand import braceexpand

from rackrun.convert.indexing.tar_index import ForeignTar
from rackrun.convert.readers.names import dataset_name
from rackrun.convert.readers.records import SPLITS, TEST, TRAIN, VAL
from rackrun.errors import UsageError
from rackrun.shards.index import ADOPTED_NAME
from rackrun.terminal import one_line

LETTERS = re.compile(r"[a-z]+")
MOST = 1_000_000  # tars, as in a manifest


@dataclass(frozen=True)
class TarListing:
    """Tars of other programs that become shards of one data set."""

    tars: tuple[ForeignTar, ...]
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
    expanded = _expanded(sources)
    remote = [location for location in expanded if location.startswith(("http://", "https://"))]
    if remote and len(remote) < len(expanded):
        raise UsageError("some tars are here and some on a server; index them separately")
    paths = [Path(location.rpartition("/")[2]) for location in remote] or _files(expanded)
    urls = {location.rpartition("/")[0] + "/" for location in remote}
    if len(urls) > 1:
        raise UsageError(f"{', '.join(sorted(urls)[:2])}: index the tars of one URL at a time")
    if len(set(paths)) < len(paths):
        raise UsageError(f"{Counter(paths).most_common(1)[0][0]}: is given twice")
    for path in paths:
        if not split and not _split_of(path):
            raise UsageError(
                f"{path}: neither train, val nor test in its name or its folder's; if all tars are "
                f"for training, type: {command} --split train"
            )
        if not ADOPTED_NAME.fullmatch(path.name):
            raise UsageError(f"{path}: a name of letters, digits, _, - and . is needed")
    tars = tuple(ForeignTar(path, path.name, split or _split_of(path)) for path in paths)
    parents = {path.parent.resolve() for path in paths}  # of links: not where these lead
    beside = parents.pop() if len(parents) == 1 and not remote else None
    return TarListing(tars, beside, "".join(urls), _dataset(name, tars[0].name))


def _expanded(sources: tuple[str, ...]) -> list[str]:
    """Return all sources, braces as in {000..003} expanded."""
    try:
        each = chain.from_iterable(braceexpand(source, escape=False) for source in sources)
        expanded = list(islice(each, MOST + 1))
    except ValueError:
        raise UsageError(f"{one_line(sources[0])[:80]}: type braces as in {{000..127}}") from None
    if len(expanded) > MOST:
        raise UsageError(f"{sources[0][:80]}: more than {MOST:,} tars; index them in parts")
    return expanded


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
    splits = (match.start() for match in LETTERS.finditer(stem.lower()) if match[0] in SPLITS)
    return dataset_name(stem if name else stem[: next(splits, None)] or stem)
