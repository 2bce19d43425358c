"""A folder of image files as a source: listed once, or files of it that a table names.

Each file is read when its turn comes.

A symbolic link is followed where it leads to something below the root, or anywhere if that was
allowed. What it leads to is settled while the folder is listed, so that it cannot be exchanged
later.
"""

import os
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

from rackrun.convert.readers.records import (
    MAX_IMAGE_BYTES,
    Defect,
    ImageDefect,
    Record,
    as_text,
    excluded,
    opened,
    reading,
    system_folder,
)
from rackrun.errors import DataError
from rackrun.shards.index import Origin

MOST_LINKS = 4  # to folders on the way to a file: more may be a circle


class Folder:
    """A folder of image files; a record's name is the path below it."""

    def __init__(self, root: Path, follow_links: bool = False, exclude: Sequence[str] = ()) -> None:
        self.root = root
        self._exclude = exclude
        self._real_root = root.resolve()
        self._follow_links = follow_links
        self._bytes = 0
        self._listing = sha256()
        self._links: dict[str, int] = {}  # how many lead to a folder, by name
        self._elsewhere: dict[str, Path] = {}  # what links lead to, by name; a folder's ends with /
        self.findings: list[ImageDefect] = []
        """Files that are no records; complete once the records are exhausted."""

    def records(self) -> Iterator[Record]:
        """Yield every file below as a record that lacks key and label, sorted by name.

        DataError for a device or the like.
        """
        pending = [""]
        while pending:
            name = pending.pop()
            if name.endswith("/") or not name:
                real = self._elsewhere.get(name, self._real_root / name)
                with reading(self.root / name), os.scandir(real) as entries:
                    names = sorted(
                        self._named(name, entry)
                        for entry in entries
                        if not self._is_left_out(f"{name}{entry.name}")
                    )
                pending += reversed(names)  # the last one is popped first
                continue
            with reading(self.root / name):
                size = self._real_path(name).lstat().st_size
            self._bytes += size
            self._listing.update(f"{name}\0{size}\n".encode("utf-8", "surrogateescape"))
            yield Record("", 0, "", name, 0, 0, size, size)

    def origin(self) -> Origin:
        """Return the folder's entry of the manifest; the listing must be complete."""
        return Origin(as_text(self._real_root.name), self._bytes, self._listing.hexdigest())

    def read(self, record: Record) -> bytes:
        """Read the image of a record; ReadError if it is gone, DataError if it has changed."""
        if record.size > MAX_IMAGE_BYTES:
            raise Defect("too large", f"{record.size:,} bytes")
        path = self._real_path(record.name)
        with reading(path), os.fdopen(opened(path), "rb", buffering=0) as file:
            data = file.read(record.size + 1)
        if len(data) != record.size:
            raise DataError(
                f"{path}: its size has changed since it was listed; when nothing writes there any "
                "more, run the same command with --force"
            )
        return data

    def _real_path(self, name: str) -> Path:
        if not self._elsewhere:
            return self.root / name
        folder, slash, file = name.rpartition("/")
        above = self._elsewhere.get(folder + slash)
        return self._elsewhere.get(name) or (above / file if above else self.root / name)

    def _is_left_out(self, name: str) -> bool:
        # Folders are not entered: lost+found is root's, and its content is nobody's image.
        kinds = {"system": system_folder(name), "excluded": excluded(name, self._exclude)}
        applying = [kind for kind, applies in kinds.items() if applies]
        self.findings += (ImageDefect(name, kind) for kind in applying[:1])
        return bool(applying)

    def _named(self, folder: str, entry: "os.DirEntry[str]") -> str:
        # That of a folder, or of a link to one, ends with a slash.
        name = f"{folder}{entry.name}"
        if entry.is_symlink():  # first: is_file and is_dir follow it
            return self._followed(name, self._links.get(folder, 0) + 1)
        if entry.is_file():
            return name
        if not entry.is_dir():
            raise DataError(f"{self.root / name}: no regular file; move it out of {self.root}")
        name += "/"
        if folder in self._elsewhere:
            self._elsewhere[name] = self._elsewhere[folder] / entry.name
            self._links[name] = self._links[folder]
        return name

    def _followed(self, name: str, links: int) -> str:
        link = self.root / name
        # Not Path.resolve, which raises an error where links lead in a circle.
        real = Path(os.path.realpath(self._real_path(name)))
        if links > MOST_LINKS:
            raise DataError(
                f"{link}: the {links}th symbolic link on the way: they lead in a circle"
            )
        if not real.is_dir() and not real.is_file():
            raise DataError(f"{link}: a symbolic link to {real}, where no file or folder is")
        if not self._follow_links and not real.is_relative_to(self._real_root):
            raise DataError(
                f"{link}: a symbolic link to {real}, outside {self.root}; if that is meant, "
                "add --follow-links"
            )
        if real.is_dir():
            name += "/"
            self._links[name] = links
        self._elsewhere[name] = real
        return name


class MissingFile(DataError):
    """A file that a table names is not there."""


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
            raise MissingFile(
                f"{where}: there is no such file in {self.root}; correct it, or --root"
            )
        size = real.stat().st_size
        self.bytes += size
        return str(real.relative_to(self.root)), size

    def read(self, record: Record) -> bytes:
        """Return the image of a record."""
        return self._folder.read(record)
