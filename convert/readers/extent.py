"""The part of an open file that is an archive, as a file of its own."""

import io
import os
from pathlib import Path

from rackrun.convert.readers.records import pread_exactly
from rackrun.errors import DataError


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
