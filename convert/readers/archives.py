"""A folder, a zip or a tar of images by its path."""

from collections.abc import Iterator
from pathlib import Path

from convert.readers.directories import Folder
from convert.readers.records import Container, Record
from convert.readers.tars import Tar
from convert.readers.zips import Zip
from rackrun.errors import UsageError


def open_images(source: Path, name: str) -> tuple[Container, Iterator[Record]]:
    """Return a folder, a zip, or a tar (also of tars) and its files, which lack key and label.

    UsageError, which calls the source by `name`, for anything else.
    """
    if source.is_dir():
        folder = Folder(source, follow_links=True)
        return folder, folder.records()
    suffix = source.suffix.lower()
    if suffix == ".zip":
        archive = Zip(source)
        return archive, archive.records()
    if suffix == ".tar":
        tar = Tar(source)
        return tar, _records(tar)
    raise UsageError(f"{source}: {name} is a folder, a zip or a tar of images")


def _records(tar: Tar) -> Iterator[Record]:
    """Yield the files of a tar, and those of tars in it."""
    for member in tar.members():
        for file in tar.members(member) if member.name.endswith(".tar") else (member,):
            yield Record("", 0, "", file.name, 0, file.offset, file.size, file.size)
