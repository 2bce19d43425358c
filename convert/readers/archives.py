"""A folder, a zip or a tar of images by its path."""

from pathlib import Path

from convert.readers.directories import Folder
from convert.readers.tars import Tar
from convert.readers.zips import Zip
from rackrun.errors import UsageError


def open_images(source: Path, name: str) -> Folder | Zip | Tar:
    """Return a folder, a zip, or a tar (also of tars).

    UsageError, which calls the source by `name`, for anything else.
    """
    if source.is_dir():
        return Folder(source, follow_links=True)
    if source.suffix.lower() == ".zip":
        return Zip(source)
    if source.suffix.lower() == ".tar":
        return Tar(source)
    raise UsageError(f"{source}: {name} is a folder, a zip or a tar of images")
