"""A folder, a zip or a tar of images by its path."""

import os
from pathlib import Path

from rackrun.convert.readers.directories import Folder
from rackrun.convert.readers.records import open_archive
from rackrun.convert.readers.tars import Tar, refuse_packed
from rackrun.convert.readers.zips import Zip
from rackrun.errors import UsageError

ZIP, USTAR, USTAR_AT = b"PK\3\4", b"ustar", 257


def open_images(source: Path) -> Folder | Zip | Tar:
    """Return a folder, a zip, or a tar (also of tars); UsageError for anything else."""
    if source.is_dir():
        return Folder(source)
    descriptor = open_archive(source)
    try:
        head = os.pread(descriptor, USTAR_AT + len(USTAR), 0)
    finally:
        os.close(descriptor)
    refuse_packed(source, head)
    if head.startswith(ZIP) or source.suffix.lower() == ".zip":
        return Zip(source)
    if head[USTAR_AT:] == USTAR or source.suffix.lower() == ".tar":
        return Tar(source)
    raise UsageError(f"{source}: SOURCE is a folder, a zip or a tar of images")
