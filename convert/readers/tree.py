"""The folders and files of a source of class folders: a folder, a zip or a tar."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path, PurePosixPath

from rackrun.convert.readers.directories import Folder
from rackrun.convert.readers.record_table import RecordTable
from rackrun.convert.readers.records import ImageDefect, Listed, excluded, open_archive, reading
from rackrun.convert.readers.tars import UNPACKS, Tar, opened_tar, refuse_packed
from rackrun.convert.readers.zips import Zip
from rackrun.errors import UsageError
from rackrun.shards.litter import HIDDEN, system_folder

ZIP, USTAR, USTAR_AT = b"PK\3\4", b"ustar", 257


@dataclass(frozen=True)
class Tree:
    """The folders and files of a source, on a disk or in an archive."""

    source: Path
    container: Folder | Zip | Tar
    records: Iterator[Listed]
    prefix: str = ""
    """The folder of an archive that all else is in, with a slash."""
    names: frozenset[PurePosixPath] | None = None
    """The folders in an archive; None for a folder on disk."""
    exclude: Sequence[str] = ()
    """Patterns of what is left out."""

    def folders(self, *below: str) -> list[str]:
        """Return the visible folders in a folder, sorted; those that a link points to as well."""
        if self.names is None:
            path = self.source.joinpath(*below)
            with reading(path):
                folders = [each.name for each in path.iterdir() if each.is_dir()]
        else:
            above = PurePosixPath(self.prefix, *below)
            folders = [path.name for path in self.names if path.parent == above]
        return sorted(
            name
            for name in folders
            if not HIDDEN.search(name)
            and not system_folder(name)
            and not excluded("/".join((*below, name)), self.exclude)
        )


def tree_of(source: Path, exclude: Sequence[str], scratch: Path) -> Tree:
    """List an archive, and only open a folder; UsageError for anything else.

    A tar that is compressed as a whole is unpacked into a file without a name in `scratch`.
    """
    if source.is_dir():
        folder = Folder(source, exclude)
        return Tree(source, folder, folder.records(), exclude=exclude)
    if not source.exists():
        raise UsageError(f"{source}: there is no such file or folder")
    container = _archive(source, scratch)
    table = RecordTable(_visible(container.records(), exclude))
    inner = {PurePosixPath(record.name).parent for record in table}
    folders = {folder for each in inner for folder in (each, *each.parents) if folder.name}
    records = chain[Listed](table.findings, table)
    tree = Tree(source, container, records, names=frozenset(folders))
    tops = tree.folders()
    if len(tops) == 1 and PurePosixPath() not in inner and tree.folders(*tops):
        return replace(tree, prefix=f"{tops[0]}/")
    return tree


def _visible(files: Iterable[Listed], exclude: Sequence[str]) -> Iterator[Listed]:
    """Yield all but hidden files; as defects those to be left out."""
    for each in files:
        if not HIDDEN.search(each.name):
            name = each.name.lstrip("./")  # ./a is a: so tar -C FOLDER . names members
            is_left_out = _is_excluded(name, exclude)
            yield ImageDefect(name, "excluded") if is_left_out else each._replace(name=name)


def _archive(source: Path, scratch: Path) -> Zip | Tar:
    """Open a zip or a tar (also of tars) by its first bytes; UsageError for anything else."""
    descriptor = open_archive(source)
    try:
        head = os.pread(descriptor, USTAR_AT + len(USTAR), 0)
    finally:
        os.close(descriptor)
    if head.startswith(ZIP) or source.suffix.lower() == ".zip":
        return Zip(source)
    is_packed = head.startswith(tuple(UNPACKS))
    if head[USTAR_AT:] == USTAR or source.suffix.lower() == ".tar" or is_packed:
        return opened_tar(source, head, scratch)
    refuse_packed(source, head)
    raise UsageError(f"{source}: SOURCE is a folder, a zip or a tar of images")


def _is_excluded(name: str, patterns: Sequence[str]) -> bool:
    path = PurePosixPath(name)
    return any(excluded(str(each), patterns) for each in (path, *path.parents))
