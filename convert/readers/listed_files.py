"""Files that a table names, all of them below one folder."""

import os
from pathlib import Path

from convert.readers.directories import Folder
from convert.readers.records import Record
from rackrun.errors import DataError


class ListedFiles:
    """The files below a folder that a table names one by one."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self.bytes = 0  # of all files that were found
        self._folder = Folder(self.root)

    def find(self, path: str, where: str) -> tuple[str, int]:
        """Return name and size of a file; DataError if it is missing or outside the folder."""
        try:
            real = Path(os.path.realpath(self.root / path))
            is_file = real.is_file()
        except OSError as error:  # a name or a path that is too long, a folder that is closed
            raise DataError(f"{where}: cannot be read: {error.strerror}; correct it") from None
        if not real.is_relative_to(self.root):
            raise DataError(
                f"{where}: outside {self.root}; add --root FOLDER that holds all images"
            )
        if not is_file:
            raise DataError(f"{where}: there is no such file in {self.root}; correct it, or --root")
        size = real.stat().st_size
        self.bytes += size
        return str(real.relative_to(self.root)), size

    def read(self, record: Record) -> bytes:
        """Return the image of a record."""
        return self._folder.read(record)
