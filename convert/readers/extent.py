"""The part of an open file that is an archive."""

import io
import os
from pathlib import Path

from rackrun.convert.readers.records import pread_exactly
from rackrun.errors import DataError


class Extent(io.RawIOBase):
    """A part of an open file that is an archive, as a file of its own.

    Processes that are forked share the descriptor: no position of it is moved.
    """

    def __init__(self, path: Path, descriptor: int, base: int, length: int, most: int) -> None:
        """Take the file's descriptor; `most` bytes are the most that is read at once."""
        super().__init__()
        self.path, self.descriptor, self.base, self.length = path, descriptor, base, length
        self._most = most
        self._position = 0

    @classmethod
    def whole(cls, path: Path, descriptor: int, most: int) -> "Extent":
        """Return all of an open file."""
        return cls(path, descriptor, 0, os.fstat(descriptor).st_size, most)

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
                "damaged, or made to do harm"
            )
        data = self.at(self._position, wanted)
        self._position += len(data)
        return data

    def at(self, position: int, length: int) -> bytes:
        """Return bytes from a position; DataError if the file has become shorter."""
        return pread_exactly(self.descriptor, length, self.base + position, self.path)
