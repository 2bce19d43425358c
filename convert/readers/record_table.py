"""Records as columns: a hundred bytes an image, where as many tuples would take five times that."""

from collections.abc import Iterable, Iterator
from hashlib import blake2b, sha256

import numpy as np

from rackrun.convert.readers.records import HELD_OUT, TEST, TRAIN, VAL, ImageDefect, Listed, Record

SPLIT_NAMES = (HELD_OUT, TEST, TRAIN, VAL)  # a column has the place in here
NO_CRC = -1
COLUMNS = np.dtype(
    [
        ("label", "<u4"),
        ("split", "<u4"),
        ("container", "<u4"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("size", "<u8"),
        ("crc", "<i8"),
        ("text", "<u8"),  # first byte of key and name in the text
        ("key", "<u4"),  # bytes of the key
        ("name", "<u4"),  # bytes of the name
    ]
)


class RecordTable:
    """Records by number; their order and their splits can be changed."""

    def __init__(self, files: Iterable[Listed]) -> None:
        self._text = bytearray()
        self.findings: list[ImageDefect] = []
        self.rows = np.fromiter(self._rows(files), COLUMNS)

    def _rows(self, files: Iterable[Listed]) -> Iterator[tuple[int, ...]]:
        for each in files:
            if isinstance(each, ImageDefect):
                self.findings.append(each)
            else:
                yield self._row(each)

    def _row(self, record: Record) -> tuple[int, ...]:
        key, name = record.key.encode(), record.name.encode("utf-8", "surrogateescape")
        start = len(self._text)
        self._text += key + name
        return (
            record.label,
            SPLIT_NAMES.index(record.split),
            *record[4:8],
            NO_CRC if record.crc is None else record.crc,
            start,
            len(key),
            len(name),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Record:
        row = self.rows[number].tolist()
        label, split, container, offset, length, size, crc, start, key, name = row
        text = self._text[start : start + key + name]
        return Record(
            key=text[:key].decode(),
            label=label,
            split=SPLIT_NAMES[split],
            name=text[key:].decode("utf-8", "surrogateescape"),
            container=container,
            offset=offset,
            length=length,
            size=size,
            crc=None if crc == NO_CRC else crc,
        )

    def __iter__(self) -> Iterator[Record]:
        return map(self.__getitem__, range(len(self)))

    def hashes(self, salt: object) -> np.ndarray:
        """Return a number of 64 bits for each record, by its key and the salt alone."""
        hashes = (
            hash_of(f"{salt}:{key.decode()}")
            for key in self._texts(self.rows["text"], self.rows["key"])
        )
        return np.fromiter(hashes, np.uint64, len(self))

    def reorder(self, order: np.ndarray) -> None:
        """Give the records another order."""
        self.rows = self.rows[order]

    def size_and_digest(self, container: int) -> tuple[int, str]:
        """Return the bytes of a container's images, and the digest of its records in order."""
        rows = self.rows[self.rows["container"] == container]
        texts = self._texts(rows["text"], rows["key"] + rows["name"])
        rows["text"] = 0  # which depends on the order in which they were listed
        digest = sha256(rows.tobytes())
        for text in texts:
            digest.update(text)
        return int(rows["size"].sum()), digest.hexdigest()

    def _texts(self, starts: np.ndarray, lengths: np.ndarray) -> Iterator[bytearray]:
        """Return so many of the first bytes of each record's text."""
        pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
        return (self._text[start : start + length] for start, length in pairs)


def hash_of(text: str) -> int:
    """Return a number of 64 bits: two of 1.3 million texts share one once in 20 million sets."""
    data = text.encode("utf-8", "surrogateescape")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")
