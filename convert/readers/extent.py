"""The part of an open file that is an archive, as a file of its own; or what it is unpacked to."""

import io
import lzma
import os
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import IO

from rackrun.atomic import translated_os_errors
from rackrun.convert.readers.records import MAX_RATIO, pread_exactly, reading
from rackrun.errors import DataError

UNPACKED_AT_ONCE = 1 << 20
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)


class Extent(io.RawIOBase):
    """A part of an open file; processes that are forked share the descriptor, and move nothing."""

    def __init__(
        self, path: Path, descriptor: int, most: int, start: int = 0, length: int | None = None
    ) -> None:
        """Take the file's descriptor; `most` bytes are the most that is read at once."""
        super().__init__()
        self.path, self.start = path, start
        self.length = os.fstat(descriptor).st_size if length is None else length
        self._descriptor, self._most, self._position = descriptor, most, 0

    def part(self, path: Path, start: int, length: int) -> "Extent":
        """Return a part of this one, which begins at a byte of the file."""
        return Extent(path, self._descriptor, self._most, start, length)

    def at(self, position: int, length: int) -> bytes:
        """Return bytes from a byte of the file on; DataError if it has become shorter."""
        return pread_exactly(self._descriptor, length, position, self.path)

    def seekable(self) -> bool:
        """Return True: any byte can be read next."""
        return True

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a byte, counted from the start, the position or the end."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.length}[whence]
        if start + offset < 0:
            raise ValueError("it has no table of contents")  # zipfile looks for it before the start
        self._position = start + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to `size` bytes; DataError for more than an archive needs at once."""
        left = max(self.length - self._position, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > self._most:
            raise DataError(
                f"{self.path}: byte {self._position:,}: {wanted:,} bytes of headers are too many: "
                "damaged or malicious"
            )
        data = self.at(self.start + self._position, wanted)
        self._position += len(data)
        return data


def unpacked(packed: IO[bytes], path: Path, packed_bytes: int, folder: Path) -> int:
    """Copy a stream that is unpacked into a file without a name; return its descriptor.

    The file is gone when the last process has closed it. DataError for a damaged archive, and for
    one that inflates too far; SaveError where the folder has no room.
    """
    size, most = 0, max(MAX_RATIO * packed_bytes, UNPACKED_AT_ONCE)
    with translated_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            while data := _unpacked(packed, path):
                size += len(data)
                if size > most:
                    raise DataError(
                        f"{path}: {packed_bytes:,} bytes inflate to more than {most:,}: damaged or"
                        " malicious"
                    )
                file.write(data)
            file.flush()
            return os.dup(file.fileno())


def _unpacked(packed: IO[bytes], path: Path) -> bytes:
    with reading(path):
        try:
            return packed.read(UNPACKED_AT_ONCE)
        except DAMAGED as error:
            if getattr(error, "errno", None):  # of the disk that it lies on
                raise
            raise DataError(f"{path}: damaged: {error}; download it again") from None
