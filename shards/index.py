"""The format of a shard folder: the card (`dataset.json`) and one per-sample index per split.

cats-train-000000.tar ...   plain tars; a sample is `<key>.cls` and, next to it, `<key>.jpg`
cats-train.index.npy        one row per sample, in the order of the tars
dataset.json                the card, written last: a folder with a card is complete
"""

import hashlib
import json
import re
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from shards.errors import DataError

if TYPE_CHECKING:
    import numpy as np

VERSION = 1
CARD_NAME = "dataset.json"

INDEX_FIELDS = [
    ("shard", "<u4"),  # number of the tar within the split
    ("offset", "<u8"),  # first byte of the sample's first header in the tar
    ("length", "<u4"),  # bytes of the sample's members: headers, contents, padding
    ("image_offset", "<u8"),  # first byte of the picture in the tar
    ("image_length", "<u4"),  # bytes of the picture
    ("label", "<u4"),  # number of the class in the card's table
    ("width", "<u4"),  # pixels, as stored (EXIF orientation is not applied)
    ("height", "<u4"),  # pixels
    ("crc", "<u4"),  # CRC-32 of the picture's bytes
]
PACKED_ROW = struct.Struct("<IQIQ5I")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
SHA256 = re.compile(r"[0-9a-f]{64}")

T = TypeVar("T")


class Row(NamedTuple):
    """One sample in the index; the fields are those of INDEX_FIELDS."""

    shard: int
    offset: int
    length: int
    image_offset: int
    image_length: int
    label: int
    width: int
    height: int
    crc: int


@dataclass(frozen=True)
class Shard:
    """One tar of a split."""

    name: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """One part of a data set, `train` or `val`: its shards in order, and its index."""

    name: str
    samples: int
    index: str
    index_sha256: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Origin:
    """An archive or folder that the pictures came from.

    `listing_sha256` is the digest of its table of contents, which costs nothing: of a zip the
    names, sizes and CRC-32 of all members, of others names and sizes.
    """

    name: str
    bytes: int
    listing_sha256: str


@dataclass(frozen=True)
class Card:
    """What a shard folder says about itself."""

    dataset: str
    classes: tuple[str, ...]
    splits: tuple[Split, ...]
    seed: int = 0
    preset: dict[str, Any] = field(default_factory=dict)
    sources: tuple[Origin, ...] = ()
    report: dict[str, int] = field(default_factory=dict)
    plan_sha256: str = ""  # digest of the conversion's plan: which picture goes where, and how
    version: int = VERSION

    def split(self, name: str) -> Split:
        """The split of that name; DataError names those there are."""
        for split in self.splits:
            if split.name == name:
                return split
        there = ", ".join(split.name for split in self.splits)
        raise DataError(f"data set {self.dataset} has no split {name!r}, only {there}")

    @property
    def digest(self) -> str:
        """The identity of the data set: it changes with any byte of any shard."""
        return hashlib.sha256(self.serialise()).hexdigest()

    def serialise(self) -> bytes:
        """The card as the text of `dataset.json`."""
        return (json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def parse(cls, text: bytes, where: str) -> "Card":
        """The card in `text`; DataError names `where` and the first thing that cannot be."""
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise DataError(f"{where}: not a data set card: {error}") from None
        return _Reader(where).card(fields)


def shard_name(dataset: str, split: str, number: int) -> str:
    """The name of the tar with that number."""
    return f"{dataset}-{split}-{number:06d}.tar"


def index_name(dataset: str, split: str) -> str:
    """The name of a split's per-sample index."""
    return f"{dataset}-{split}.index.npy"


def brace_name(split: Split) -> str:
    """All shards of a split as one name with braces, as webdataset and shells expand it."""
    first, last = split.shards[0].name, split.shards[-1].name
    stem, low, high = first[:-10], first[-10:-4], last[-10:-4]
    return first if low == high else f"{stem}{{{low}..{high}}}.tar"


def serialise_index(rows: bytes) -> bytes:
    """Packed rows as the bytes of a `.npy` file (format 1.0), without the cost of numpy."""
    if len(rows) % PACKED_ROW.size:
        raise ValueError(f"{len(rows)} bytes are not whole rows of {PACKED_ROW.size}")
    shape = (len(rows) // PACKED_ROW.size,)
    header = repr({"descr": INDEX_FIELDS, "fortran_order": False, "shape": shape})
    header += " " * (-(10 + len(header) + 1) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + rows


def pack_rows(rows: Iterable[Row]) -> bytes:
    """Rows as they stand in the index file."""
    return b"".join(PACKED_ROW.pack(*row) for row in rows)


def parse_index(data: bytes, card: Card, split: Split, where: str) -> "np.ndarray":
    """The index of a split, held against its digest and against the card."""
    import numpy as np

    if hashlib.sha256(data).hexdigest() != split.index_sha256:
        raise DataError(f"{where}: {split.index} does not have the digest that the card says")
    try:
        rows = np.lib.format.read_array(BytesIO(data), allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{where}: {split.index} is not a numpy array: {error}") from None
    check_index(rows, card, split, where)
    return rows


def check_index(rows: "np.ndarray", card: Card, split: Split, where: str) -> None:
    """DataError unless the rows cover the shards of the card without a gap, in order."""
    import numpy as np

    def demand(holds: Any, what: str) -> None:
        if not holds:
            raise DataError(f"{where}: {split.index}: {what}")

    demand(rows.dtype == np.dtype(INDEX_FIELDS) and rows.ndim == 1, "not a sample index")
    demand(len(rows) == split.samples, f"{len(rows)} rows for {split.samples} samples")
    demand(bool(np.all(np.diff(rows["shard"].astype(np.int64)) >= 0)), "rows are out of order")
    counts = np.bincount(rows["shard"], minlength=len(split.shards)).tolist()
    demand(counts == [shard.samples for shard in split.shards], "samples per shard differ")
    ends = rows["offset"] + rows["length"]
    first = np.flatnonzero(np.diff(rows["shard"], prepend=np.uint32(2**32 - 1)))
    starts = np.concatenate(([0], ends[:-1])).astype(np.uint64)
    starts[first] = 0
    demand(np.array_equal(rows["offset"], starts), "samples do not follow one another")
    sizes = np.array([shard.bytes for shard in split.shards], np.uint64)
    demand(bool(np.all(ends <= sizes[rows["shard"]])), "a sample ends beyond its shard")
    inside = (rows["image_offset"] >= rows["offset"]) & (
        rows["image_offset"] + rows["image_length"] <= ends
    )
    demand(bool(np.all(inside)), "a picture lies outside its sample")
    demand(bool(np.all(rows["label"] < len(card.classes))), "a label is outside the classes")


@dataclass(frozen=True)
class _Reader:
    """Turns the JSON of a card into a Card; every complaint says where."""

    where: str

    def card(self, fields: Any) -> Card:
        version = self.take(fields, "version", int)
        if version != VERSION:
            self.fail(f"version {version}, and this program reads version {VERSION}")
        dataset = self.name(fields, "dataset")
        classes = tuple(self.take(fields, "classes", list))
        if not classes or not all(isinstance(name, str) for name in classes):
            self.fail("classes are not a list of names")
        splits = tuple(self.split(part, dataset) for part in self.take(fields, "splits", list))
        if len({split.name for split in splits if split.samples}) < max(1, len(splits)):
            self.fail("an empty split, none at all, or two of the same name")
        return Card(
            dataset=dataset,
            classes=classes,
            splits=splits,
            seed=self.take(fields, "seed", int),
            preset=self.take(fields, "preset", dict),
            sources=tuple(self.origin(part) for part in self.take(fields, "sources", list)),
            report=self.take(fields, "report", dict),
            plan_sha256=self.take(fields, "plan_sha256", str),
        )

    def split(self, fields: Any, dataset: str) -> Split:
        name = self.name(fields, "name")
        shards = tuple(self.shard(part) for part in self.take(fields, "shards", list))
        for number, shard in enumerate(shards):
            if shard.name != shard_name(dataset, name, number):
                self.fail(f"shard {number} of {name} is called {shard.name!r}")
            if not shard.samples:
                self.fail(f"{shard.name} has no samples")
        split = Split(
            name=name,
            samples=self.size(fields, "samples"),
            index=self.take(fields, "index", str),
            index_sha256=self.digest(fields, "index_sha256"),
            shards=shards,
        )
        if split.index != index_name(dataset, name):
            self.fail(f"the index of {name} is called {split.index!r}")
        if split.samples != sum(shard.samples for shard in shards):
            self.fail(f"the shards of {name} do not hold its {split.samples} samples")
        return split

    def shard(self, fields: Any) -> Shard:
        return Shard(
            name=self.take(fields, "name", str),
            samples=self.size(fields, "samples"),
            bytes=self.size(fields, "bytes"),
            sha256=self.digest(fields, "sha256"),
        )

    def origin(self, fields: Any) -> Origin:
        return Origin(
            name=self.take(fields, "name", str),
            bytes=self.size(fields, "bytes"),
            listing_sha256=self.digest(fields, "listing_sha256"),
        )

    def name(self, fields: Any, key: str) -> str:
        value = self.take(fields, key, str)
        return value if NAME.fullmatch(value) else self.fail(f"{value!r} is not a plain name")

    def digest(self, fields: Any, key: str) -> str:
        value = self.take(fields, key, str)
        return value if SHA256.fullmatch(value) else self.fail(f"{key} is not a SHA-256")

    def size(self, fields: Any, key: str) -> int:
        value = self.take(fields, key, int)
        return value if value >= 0 else self.fail(f"{key} is negative")

    def take(self, fields: Any, key: str, kind: type[T]) -> T:
        value = fields.get(key) if isinstance(fields, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool):
            self.fail(f"{key!r} is missing or not {kind.__name__}")
        return value

    def fail(self, what: str) -> NoReturn:
        raise DataError(f"{self.where}: not a data set card of ours: {what}")
