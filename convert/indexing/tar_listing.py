"""The tars that a command line names, each with its split."""

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rackrun.convert.indexing.tar_index import ForeignTar
from rackrun.convert.readers.names import dataset_name
from rackrun.convert.readers.records import SPLITS, TEST, TRAIN, VAL
from rackrun.errors import UsageError
from rackrun.shards.index import TAR_NAME

LETTERS = re.compile(r"[a-z]+")


def list_tars(sources: Sequence[str], split: str, command: str) -> list[ForeignTar]:
    """Return the tars in these folders or at these paths; UsageError if that is not possible.

    `split`: of all tars, empty: by their names. `command` is what was typed, for a message.
    """
    if split and split not in (TRAIN, VAL, TEST):
        raise UsageError(f"--split {split}: train, val and test are possible")
    paths = [path for source in sources for path in _files(source)]
    if len(set(paths)) < len(paths):
        raise UsageError(f"{Counter(paths).most_common(1)[0][0]}: is given twice")
    for path in paths:
        if not split and not _split_of(path):
            raise UsageError(
                f"{path}: neither train, val nor test in its name or its folder's; if all tars are "
                f"for training, type: {command} --split train"
            )
        if not TAR_NAME.fullmatch(path.name):
            raise UsageError(f"{path}: a name of letters, digits, _, - and . is needed")
    return [ForeignTar(path, path.name, split or _split_of(path)) for path in paths]


def dataset_of(tars: Sequence[ForeignTar]) -> str:
    """Return the name of a data set: what precedes split and number in that of the first tar."""
    stem = tars[0].name.removesuffix(".tar")
    splits = (match.start() for match in LETTERS.finditer(stem.lower()) if match[0] in SPLITS)
    return dataset_name(stem[: next(splits, None)] or stem)


def _files(source: str) -> list[Path]:
    path = Path(source)
    if not path.exists():
        raise UsageError(f"{source}: there is no such file or folder{_elsewhere(source)}")
    tars = sorted(path.rglob("*.tar")) if path.is_dir() else [path]
    if not tars or not all(tar.is_file() for tar in tars):
        packed = path.is_dir() and [*path.rglob("*.tar.gz"), *path.rglob("*.tgz")]
        raise UsageError(
            f"{packed[0]}: a compressed tar, which cannot be read in place;"
            f" type: gunzip {shlex.quote(str(packed[0]))}"
            if packed
            else f"{source}: no tars there; give a folder with *.tar, or tars"
        )
    return tars


def _elsewhere(source: str) -> str:
    """Return what to type for tars that do not lie on this machine; nothing for others."""
    if source.startswith(("http://", "https://")):
        return (
            f"; index the tars where they lie, or train on them without an index: --data"
            f" {shlex.quote(source)} --resampled"
        )
    if not source.startswith("hf:/"):
        return ""
    name = "/".join(source.removeprefix("hf:").strip("/").removeprefix("datasets/").split("/")[:2])
    return f"; to fetch it, type: hf download --repo-type dataset {shlex.quote(name)}"


def _split_of(path: Path) -> str:
    parts = (*LETTERS.findall(path.name.lower()), path.parent.name.lower())
    return next((SPLITS[part] for part in parts if part in SPLITS), "")
