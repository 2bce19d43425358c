"""An index that numpy maps, and a manifest that is trusted only when it can be."""

import contextlib
import json
import tracemalloc
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.errors import DataError
from rackrun.shards.index import (
    INDEX_FIELDS,
    Manifest,
    Shard,
    Split,
    brace_name,
    check_index,
    parse_index,
    serialize_index,
)
from rackrun.shards.open import open_source

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
FORMATS = st.sampled_from([b"", b"jpg", b"webp"])
ROWS = st.tuples(U32, U64, U32, U64, U32, U32, U32, U32, U32, FORMATS)


@given(rows=st.lists(ROWS, max_size=20))
def test_numpy_reads_the_rows_as_they_were_written(rows, tmp_path_factory):
    """Any values, any number of rows: np.load maps the file, fields by name."""
    path = tmp_path_factory.getbasetemp() / "rows.npy"
    path.write_bytes(serialize_index(rows))
    loaded = np.load(path, mmap_mode="r" if rows else None, allow_pickle=False)
    assert loaded.dtype == np.dtype(INDEX_FIELDS)
    assert loaded.tolist() == rows


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda rows: rows[:-1], "29 rows for 30 samples"),
        (lambda rows: rows[::-1], "out of order"),
        (lambda rows: with_value(rows, 3, "shard", 1), "out of order"),
        (lambda rows: with_value(rows, 9, "shard", 1), "samples per shard differ"),
        (lambda rows: with_value(rows, 5, "offset", 0), "samples overlap"),
        (lambda rows: with_value(rows, 9, "length", 1 << 30), "ends beyond its shard"),
        (lambda rows: with_value(rows, 5, "image_offset", 2**64 - 1), "lies outside its sample"),
        (lambda rows: with_value(rows, 5, "image_offset", 0), "lies outside its sample"),
        (lambda rows: with_value(rows, 5, "image_length", 1 << 20), "lies outside its sample"),
        (lambda rows: with_value(rows, 5, "label", 2), "a label is outside the classes"),
        (lambda rows: rows["label"], "not a sample index"),
    ],
)
def test_an_index_that_contradicts_the_manifest_is_refused(change, says, tiny):
    """Rows missing, in another order, overlapping, beyond their shard, with impossible labels."""
    manifest = open_source(str(tiny.folder)).manifest
    rows = np.load(tiny.folder / "tiny-train.index.npy")
    check_index(rows, manifest, manifest.split("train"), "here")
    with pytest.raises(DataError, match=f"here: tiny-train.index.npy: .*{says}"):
        check_index(change(rows), manifest, manifest.split("train"), "here")


def with_value(rows: np.ndarray, row: int, name: str, value: int) -> np.ndarray:
    changed = rows.copy()
    changed[name][row] = value
    return changed


@pytest.mark.security("DATA-1")
def test_a_pickle_for_an_index_is_not_opened(tiny, tmp_path):
    """A .npy of pickled objects is refused, and nothing in it runs."""
    manifest = open_source(str(tiny.folder)).manifest
    np.save(tmp_path / "evil.npy", np.array([Canary(tmp_path / "canary")]), allow_pickle=True)
    data = (tmp_path / "evil.npy").read_bytes()
    split = Split("train", 1, "tiny-train.index.npy", sha256(data).hexdigest(), ())
    with pytest.raises(DataError, match="not a sample index"):
        parse_index(data, manifest, split, "here")
    assert not (tmp_path / "canary").exists()


class Canary:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_manifest_comes_back_as_it_went(tiny):
    """Serialized and parsed, a manifest is equal; the digest that it carries covers the rest."""
    text = (tiny.folder / "dataset.json").read_bytes()
    manifest = Manifest.parse(text, "here")
    assert manifest.serialize() == text and manifest.digest == json.loads(text)["sha256"]
    fields = json.loads(text)
    del fields["sha256"]
    unsigned = (json.dumps(fields, indent=1, ensure_ascii=False) + "\n").encode()
    assert manifest.digest == sha256(unsigned).hexdigest()


def test_every_flipped_bit_of_a_manifest_is_found(tiny):
    """Also in the names of classes, which no other digest covers."""
    text = (tiny.folder / "dataset.json").read_bytes()
    manifest = Manifest.parse(text, "here")
    for position in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[position // 8] ^= 1 << position % 8
        with contextlib.suppress(DataError):
            assert Manifest.parse(bytes(flipped), "here") == manifest, position


def test_a_manifest_is_as_long_as_the_server_allows(tiny):
    """40 MiB, which the server and the preflight let through, reach the ranks as well."""
    text = (tiny.folder / "dataset.json").read_bytes()
    assert Manifest.parse(text + b" " * (40 << 20), "here") == Manifest.parse(text, "here")


@pytest.mark.parametrize("number", [2**32 - 1, 30_000_000, 3])
def test_an_index_bomb_costs_no_memory(number, tiny):
    """300 bytes that name a shard that is not there: 32 GiB were asked for to count it."""
    manifest = open_source(str(tiny.folder)).manifest
    rows = np.load(tiny.folder / "tiny-train.index.npy")
    tracemalloc.start()
    with pytest.raises(DataError, match="samples per shard differ"):
        check_index(
            with_value(rows, 29, "shard", number), manifest, manifest.split("train"), "here"
        )
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("shards", "name"),
    [
        ([f"a-val-{number:06d}.tar" for number in range(1)], "a-val-000000.tar"),
        ([f"a-val-{number:06d}.tar" for number in range(12)], "a-val-{000000..000011}.tar"),
        (["v1-8.tar", "v1-9.tar", "v1-10.tar"], "v1-{8..10}.tar"),
        (["v1-08_of_9.tar", "v1-08_of_10.tar"], "v1-08_of_{9..10}.tar"),
        (["a-0.tar", "a-1.tar", "a-3.tar"], "{a-0.tar,a-1.tar,a-3.tar}"),
        (["a-0.tar", "b-1.tar"], "{a-0.tar,b-1.tar}"),
        (["a.tar", "b.tar"], "{a.tar,b.tar}"),
    ],
)
def test_brace_names(shards, name):
    """All shards of a split in one name, as webdataset and bash expand it."""
    parts = tuple(Shard(shard, 1, 1, "") for shard in shards)
    assert brace_name(Split("val", len(shards), "", "", parts)) == name
