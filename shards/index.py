"""The format of a shard folder: the manifest (`dataset.json`), and an index of samples per split.

cats-train-000000.tar ...   plain tars; a sample is `<key>.cls` and, next to it, `<key>.jpg`
cats-train.index.npy        one row per sample, in the order of the tars
dataset.json                the manifest, written last: a folder with a manifest is complete
dataset.v1.json ...         the manifests of earlier versions (`rackrun convert append`, `drop`)
cats-train.v2.index.npy     the index of a later version; the tars are those of all versions

The index is the truth: a sample that no row names is not part of the version, and its class is that
of its row, whatever its .cls says.

Tars of other programs can be adopted: they keep their names and bytes, and get an index and a
manifest (`rackrun convert index`). Their samples may have additional members in any order.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import fields as fields_of
from mmap import mmap
from typing import Annotated, Any

import numpy as np

from rackrun import npy
from rackrun.commands import called
from rackrun.contract.files import LARGEST_MANIFEST
from rackrun.errors import DataError, Unavailable, UsageError
from rackrun.shapes import Misshapen, Real, Whole, at_most, between, matches, parsed_json, shaped

VERSION = 1

INDEX_FIELDS = [
    ("shard", "<u4"),  # number of the tar within the split
    ("offset", "<u8"),  # first byte of the sample's first header in the tar
    ("length", "<u4"),  # bytes of the sample's members: headers, contents, padding
    ("image_offset", "<u8"),  # first byte of the image in the tar
    ("image_length", "<u4"),  # bytes of the image
    ("label", "<u4"),  # number of the class in the manifest's table
    ("width", "<u4"),  # pixels, as stored (EXIF orientation is not applied)
    ("height", "<u4"),  # pixels
    ("crc", "<u4"),  # CRC-32 of the image's bytes
    ("format", "|S4"),  # jpg, png, gif, bmp or webp, whatever the image's extension
]
TAR_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,250}\.tar")
INDEX_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,250}\.index\.npy")
NUMBERED = re.compile(r"(.*?)([0-9]*)([^0-9]*)")  # a name, and the last number in it
HEADER_BYTES = 512  # before the image, with its name

MOST_VERSIONS = 10_000
LONGEST_COMMAND = 500  # letters
MOST_PARTS = 1000  # of a name with braces

Name = Annotated[str, matches(r"[A-Za-z0-9][A-Za-z0-9_-]*")]
Sha256 = Annotated[str, matches(r"[0-9a-f]{64}")]
Size = Annotated[int, between(0, 2**53)]
Count = Annotated[int, between(1, 2**53)]
Plain = str | Whole | Real | bool | None
ReadFile = Callable[[str, int], bytes]
"""Returns a file of the folder by its name, up to that many bytes."""

Row = tuple[int, int, int, int, int, int, int, int, int, bytes]
"""One sample, in the order of INDEX_FIELDS."""


@dataclass(frozen=True)
class Shard:
    """One tar of a split."""

    name: str
    samples: Count
    bytes: Size
    sha256: Sha256


@dataclass(frozen=True)
class Split:
    """One part of a data set, `train` or `val`: its shards in order, and its index."""

    name: Name
    samples: Count
    index: str
    index_sha256: Sha256
    shards: Annotated[tuple[Shard, ...], at_most(1_000_000)]


@dataclass(frozen=True)
class Origin:
    """An archive or folder that the images came from.

    `bytes` are those of its images, `listing_sha256` is the digest of their names, keys, classes,
    splits, places and sizes, and of their CRC-32s where these are known, as in a zip.
    """

    name: str
    bytes: Size
    listing_sha256: Sha256


@dataclass(frozen=True)
class Manifest:
    """The content of dataset.json."""

    dataset: Name
    classes: Annotated[tuple[str, ...], at_most(1_000_000)]
    splits: tuple[Split, ...]
    preset: dict[str, Plain] = field(default_factory=dict)
    upright: bool = True
    """False if images lie as they were stored, whatever their EXIF says (--exif ignore)."""
    sources: tuple[Origin, ...] = ()
    report: dict[str, Whole] = field(default_factory=dict)
    plan_sha256: str = ""  # digest of the conversion's plan: which image goes where, and how
    version: Whole = VERSION
    adopted: bool = False
    """True for tars that another program has written."""
    parents: Annotated[tuple[Sha256, ...], at_most(MOST_VERSIONS)] = ()
    """The digests of all versions before this one, the first one first: the last is its parent."""
    change: dict[str, Count] = field(default_factory=dict)
    """The number of samples added, dropped and relabeled."""
    made: Annotated[str, at_most(40)] = ""
    """When a later version than the first was made, as 2026-11-26 12:00 UTC."""
    command: Annotated[str, at_most(LONGEST_COMMAND)] = ""
    """What was typed for it."""

    @property
    def number(self) -> int:
        """The number of this version: 1 for a folder that was converted once."""
        return len(self.parents) + 1

    @property
    def lineage(self) -> str:
        """The digest of the first version, which all versions share."""
        return (*self.parents, self.digest)[0]

    def split(self, name: str) -> Split:
        """Return the split of that name; raise a DataError that lists all names."""
        for split in self.splits:
            if split.name == name:
                return split
        names = ", ".join(split.name for split in self.splits)
        raise DataError(f"data set {self.dataset} has no split {name!r}, only {names}")

    def files(self) -> set[str]:
        """Return the names of all shards and indexes."""
        shards = {shard.name for split in self.splits for shard in split.shards}
        return shards | {split.index for split in self.splits}

    @property
    def digest(self) -> str:
        """Return the identity of the data set: any byte of a shard or the manifest changes it."""
        return hashlib.sha256(_as_text(asdict(self))).hexdigest()

    def serialize(self) -> bytes:
        """Return the manifest as the text of `dataset.json`, its own digest at the end."""
        return _as_text({**asdict(self), "sha256": self.digest})

    @classmethod
    def parse(cls, text: bytes, where: str) -> "Manifest":
        """Return the manifest in `text`; DataError names `where` and the first invalid field."""
        try:
            fields = parsed_json(text, LARGEST_MANIFEST)
            digest = None
            if isinstance(fields, dict):
                version, digest = fields.get("version"), fields.pop("sha256", None)
                if version is not None and version != VERSION:
                    what = f"version {str(version)[:20]!r}"
                    raise Misshapen(f"{what}, and this program reads {VERSION}")
                if unknown := sorted(fields.keys() - {each.name for each in fields_of(cls)}):
                    raise Misshapen(
                        f"unknown field {unknown[0][:40]!r}: another version of rackrun has written"
                        " it; convert the images again"
                    )
            manifest: Manifest = shaped(fields, cls, "manifest")
            if digest is None:
                raise Misshapen("manifest: no field 'sha256'")
            shaped(digest, Sha256, "manifest.sha256")
            _check(manifest)
            # json.loads notices no flipped byte in a number, and every other digest hangs on this.
            if digest != manifest.digest:
                raise Misshapen("damaged: its SHA-256 is not that of its fields")
            return manifest
        except Misshapen as error:
            raise DataError(f"{where}: not a data set manifest: {error}") from None


def _as_text(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields, indent=1, ensure_ascii=False) + "\n").encode()


def _check(manifest: Manifest) -> None:
    if not manifest.classes:
        raise Misshapen("no classes")
    if not manifest.splits or len({split.name for split in manifest.splits}) < len(manifest.splits):
        raise Misshapen("no splits, or two of the same name")
    names = [shard.name for split in manifest.splits for shard in split.shards]
    if len(set(names)) < len(names):
        raise Misshapen("two shards of the same name")
    for split in manifest.splits:
        if not INDEX_NAME.fullmatch(split.index):
            raise Misshapen(f"the index of {split.name} is called {split.index[:99]!r}")
        if wrong := [each.name for each in split.shards if not TAR_NAME.fullmatch(each.name)]:
            raise Misshapen(f"a shard of {split.name} is called {wrong[0][:99]!r}")
        if split.samples != sum(shard.samples for shard in split.shards):
            raise Misshapen(f"the shards of {split.name} do not hold its {split.samples} samples")


def shard_name(dataset: str, split: str, number: int) -> str:
    """Return the name of the tar with that number."""
    return f"{dataset}-{split}-{number:06d}.tar"


def shard_number(name: str, dataset: str, split: str) -> int:
    """Return the number in the name of a tar; -1 if it is not called as conversions call it."""
    digits = name.removeprefix(f"{dataset}-{split}-").removesuffix(".tar")
    number = int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 10 else -1
    return number if name == shard_name(dataset, split, number) else -1


def index_name(dataset: str, split: str, version: int = 1) -> str:
    """Return the name of a split's per-sample index."""
    return f"{dataset}-{split}{f'.v{version}' if version > 1 else ''}.index.npy"


def manifest_name(version: int) -> str:
    """Return the name of the manifest of a version that is no longer the newest."""
    return f"dataset.v{version}.json"


class MissingVersion(DataError):
    """A version whose manifest is not there."""


def read_version(newest: Manifest, number: int, read_file: ReadFile, folder: str) -> Manifest:
    """Return the manifest of a version; UsageError if there is none of that number.

    MissingVersion if its file is not there, DataError if it is not the one that the newest version
    follows from.
    """
    if number == newest.number:
        return newest
    log = f"type: {called('convert')} summary {folder}"
    if number > newest.number:
        raise UsageError(f"{folder}: no version {number}; the newest is {newest.number}; {log}")
    name = manifest_name(number)
    try:
        text = read_file(name, LARGEST_MANIFEST)
    except Unavailable:
        raise
    except DataError as error:
        why = f"version {number} is not here any more; {log}"
        raise MissingVersion(f"{error}; {why}") from None
    manifest = Manifest.parse(text, f"{folder.rstrip('/')}/{name}")
    # Neither a circle nor a fork can have these digests, so the chain between need not be walked.
    expected = newest.parents[: number - 1], newest.parents[number - 1]
    if (manifest.parents, manifest.digest) != expected:
        raise DataError(
            f"{folder.rstrip('/')}/{name}: not the version {number} from which the newest one was "
            "made: its SHA-256 differs; copy it from where the folder was made"
        )
    return manifest


def brace_name(split: Split) -> str:
    """Return all shards of a split as one name with braces, as webdataset and shells expand it.

    Of more than 1,000 names that do not count up, the first and the last.
    """
    names = [shard.name for shard in split.shards]
    first, last = NUMBERED.fullmatch(names[0]), NUMBERED.fullmatch(names[-1])
    assert first and last
    if len(names) == 1:
        return names[0]
    head, digits, tail = first.groups()
    start, width = int(digits or 0), len(digits)
    if names == [f"{head}{number:0{width}}{tail}" for number in range(start, start + len(names))]:
        return f"{head}{{{digits}..{last[2]}}}{tail}"
    return f"{{{','.join(names)}}}" if len(names) <= MOST_PARTS else f"{names[0]} … {names[-1]}"


def serialize_index(rows: Sequence[Row] | np.ndarray) -> bytes:
    """Return rows as the bytes of a `.npy` file."""
    packed = np.asarray(rows, INDEX_FIELDS)
    return npy.header(INDEX_FIELDS, packed.shape) + packed.tobytes()


def largest_index(samples: int) -> int:
    """Return the most bytes that the index of so many samples may have.

    Other writers pad their headers more than this one.
    """
    rows = samples * np.dtype(INDEX_FIELDS).itemsize
    return len(npy.header(INDEX_FIELDS, (samples,))) + rows + 64


def parse_index(data: bytes | mmap, manifest: Manifest, split: Split, where: str) -> np.ndarray:
    """Return the index of a split, checked against its digest and the manifest."""
    if hashlib.sha256(data).hexdigest() != split.index_sha256:
        raise DataError(f"{where}: {split.index}: its SHA-256 is not the one in the manifest")
    try:
        rows = npy.array(data, INDEX_FIELDS)
    except ValueError as error:
        raise DataError(f"{where}: {split.index}: not a sample index: {error}") from None
    check_index(rows, manifest, split, where)
    return rows


def check_index(rows: np.ndarray, manifest: Manifest, split: Split, where: str) -> None:
    """Raise DataError unless the rows name samples of the manifest's shards, in their order.

    They need not name every member of a tar: samples that were dropped are in no row.
    """

    def demand(holds: Any, what: str) -> None:
        if not holds:
            raise DataError(f"{where}: {split.index}: {what}")

    demand(rows.dtype == np.dtype(INDEX_FIELDS) and rows.ndim == 1, "not a sample index")
    demand(len(rows) == split.samples, f"{len(rows)} rows for {split.samples} samples")
    numbers = rows["shard"]
    # What readers take for granted: blocks of the cache and the exact reader cut by searchsorted.
    demand(bool(np.all(numbers[1:] >= numbers[:-1])), "rows are out of order")
    counts = np.diff(np.searchsorted(numbers, np.arange(len(split.shards) + 1, dtype=np.uint64)))
    demand(counts.tolist() == [shard.samples for shard in split.shards], "samples per shard differ")
    sizes = np.array([shard.bytes for shard in split.shards], np.uint64)[numbers]
    starts, ends = rows["offset"], rows["offset"] + rows["length"]
    demand(bool(np.all((starts < sizes) & (ends <= sizes))), "a sample ends beyond its shard")
    is_next = numbers[1:] == numbers[:-1]
    demand(bool(np.all(starts[1:][is_next] >= ends[:-1][is_next])), "samples overlap")
    start, length = rows["image_offset"], rows["image_length"]
    inside = (start >= starts + HEADER_BYTES) & (start <= ends) & (start + length <= ends)
    demand(bool(np.all(inside)), "an image lies outside its sample")
    demand(bool(np.all(rows["label"] < len(manifest.classes))), "a label is outside the classes")
