"""A folder of image files as a source: listed once, or files of it that a table names.

Each file is read when its turn comes. Symbolic links are followed, as whoever made them expects,
and counted.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from unicodedata import normalize

from rackrun.convert.readers.records import (
    ImageDefect,
    Listed,
    Record,
    as_text,
    excluded,
    opened,
    reading,
)
from rackrun.errors import DataError
from rackrun.shards.litter import system_folder
from rackrun.terminal import clean, say
from rackrun.units import first_few, plural

NAMED = 3  # links that a line names


class Folder:
    """A folder of image files; a record's name is the path below it."""

    def __init__(self, root: Path, exclude: Sequence[str] = ()) -> None:
        self.root = root
        self._exclude = exclude
        self._links = list[str]()

    def records(self) -> Iterator[Listed]:
        """Yield every file below as a record that lacks key and label, sorted by name.

        What is left out is yielded as defects. DataError for a device or the like, and for links
        that lead nowhere or in a circle.
        """
        with reading(self.root):
            above = [self.root.stat()]
        yield from self._below("", above)
        if self._links:
            links, names = plural(len(self._links), "symbolic link"), first_few(self._links, NAMED)
            say(clean(f"{self.root}: {links} followed: {names}"))

    @property
    def name(self) -> str:
        """The folder's name."""
        return as_text(self.root.resolve().name)

    def read(self, record: Record, start: int = 0) -> bytes:
        """Read the image of a record; ReadError if it is gone, DataError if it has changed."""
        path = self.root / record.name
        with reading(path), os.fdopen(opened(path), "rb", buffering=0) as file:
            file.seek(start)
            data = file.read(record.size - start + 1)
        if len(data) != record.size - start:
            raise DataError(
                f"{path}: its size has changed since it was listed; once nothing writes to it any "
                "more, type the same command with --force"
            )
        return data

    def _below(self, folder: str, above: list[os.stat_result]) -> Iterator[Listed]:
        """Yield the files below a folder, whose name ends with a slash; `above` lead to it."""
        with reading(self.root / folder), os.scandir(self.root / folder) as entries:
            listed = list[tuple[str, os.stat_result]]()
            for entry in entries:
                # Folders are not entered: lost+found is root's, and its content is nobody's image.
                if kind := self._left_out_as(f"{folder}{entry.name}"):
                    yield ImageDefect(f"{folder}{entry.name}", kind)
                else:
                    listed.append((self._named(folder, entry), entry.stat()))
        for name, status in sorted(listed):
            if not name.endswith("/"):
                yield Record("", 0, "", name, 0, 0, status.st_size, status.st_size)
            elif any(os.path.samestat(status, each) for each in above):
                raise DataError(
                    clean(f"{self.root / name}: a symbolic link to a folder that it lies in: links")
                    + " lead in a circle"
                )
            else:
                yield from self._below(name, [*above, status])

    def _left_out_as(self, name: str) -> str:
        """Return why a file or folder is left out; empty if it is not."""
        if system_folder(name):
            return "system"
        return "excluded" if excluded(name, self._exclude) else ""

    def _named(self, folder: str, entry: "os.DirEntry[str]") -> str:
        """Return the name of a file, or that of a folder and a slash."""
        name, path = f"{folder}{entry.name}", self.root / folder / entry.name
        if entry.is_symlink():
            if not path.exists():
                raise DataError(
                    clean(f"{path}: a symbolic link to {path.readlink()}, where nothing is")
                )
            self._links.append(name)
        mode = entry.stat().st_mode
        if stat.S_ISDIR(mode):
            return f"{name}/"
        if not stat.S_ISREG(mode):
            where = f"{path}: {f'a link to {path.readlink()}, ' if entry.is_symlink() else ''}"
            raise DataError(clean(f"{where}no regular file; move it out of {self.root}"))
        return name


class MissingFile(DataError):
    """A file that a table names is not there."""


class ListedFiles:
    """The files below a folder that a table names one by one."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self._folder = Folder(self.root)

    def find(self, path: str, where: str) -> tuple[str, int]:
        """Return name and size of a file; DataError if it is missing or outside the folder."""
        try:
            # macOS takes the letters in names of files apart, which nobody sees.
            forms = dict.fromkeys((path, normalize("NFC", path), normalize("NFD", path)))
            found = [Path(os.path.realpath(self.root / form)) for form in forms]
            real = next((each for each in found if each.is_file()), found[0])
            is_file = real.is_file()
        except OSError as error:  # a name or a path that is too long, a folder that is closed
            raise DataError(f"{where}: cannot be read: {error.strerror}; correct it") from None
        if not real.is_relative_to(self.root):
            remedy = "add --root FOLDER that holds all images"
            if not is_file:
                remedy = "there is no such file; write paths as they are below --root FOLDER"
            raise DataError(f"{where}: outside {self.root}; {remedy}")
        if not is_file:
            raise MissingFile(
                f"{where}: there is no such file in {self.root}; correct it, or --root"
            )
        return str(real.relative_to(self.root)), real.stat().st_size

    def read(self, record: Record, start: int = 0) -> bytes:
        """Return the image of a record."""
        return self._folder.read(record, start)
