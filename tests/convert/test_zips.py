"""Zips are read in place, and malicious ones do no harm."""

import struct
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.convert.images.treatment import Treatment
from rackrun.convert.readers.records import Defect
from rackrun.convert.readers.zips import Zip, inflated
from rackrun.errors import DataError
from rackrun.shards.resize import Resize
from tests.lab.data import write_zip

FILES = {"a.jpg": b"a" * 300, "b/ü.jpg": bytes(range(256)) * 9, "c.jpg": b""}


def contents(path: Path) -> dict[str, bytes]:
    archive = Zip(path)
    return {record.name: archive.read(record) for record in archive.records()}


def test_zip64_and_streamed_archives(tmp_path):
    """64-bit sizes, sizes behind the content, 66,000 members and folders: all are understood."""
    path = tmp_path / "a.zip"
    with path.open("wb") as file, zipfile.ZipFile(Unseekable(file), "w") as archive:
        archive.mkdir("many")
        with archive.open("wide.jpg", "w", force_zip64=True) as member:
            member.write(b"wide")
        for number in range(66_000):
            archive.writestr(zipfile.ZipInfo(f"many/{number}"), b"%d" % number)
    content = contents(path)
    assert len(content) == 66_001
    assert content["wide.jpg"] == b"wide" and content["many/65999"] == b"65999"


class Unseekable:
    """A pipe-like file: zipfile then writes each member's sizes after its content."""

    def __init__(self, file: object) -> None:
        self.write, self.flush = file.write, file.flush


def test_something_before_the_archive(tmp_path):
    """A self-extracting archive has a program in front: its offsets are shifted."""
    path = write_zip(tmp_path / "a.zip", FILES)
    path.write_bytes(b"#!/bin/sh\n" * 20 + path.read_bytes())
    assert contents(path) == FILES


def test_a_damaged_inner_archive_is_refused(tmp_path):
    """The CRC-32 of an inner archive is checked while it is unpacked."""
    path = write_zip(tmp_path / "o.zip", {"train.zip": bytes(10_000)}, deflated=True)
    data = path.read_bytes()
    crc = struct.pack("<L", zlib.crc32(bytes(10_000)))
    path.write_bytes(data.replace(crc, b"\1\0\0\0"))
    archive = Zip(path)
    with pytest.raises(DataError, match="train.zip: damaged"):
        archive.within(next(archive.records()), tmp_path)


@pytest.mark.security("DATA-2")
def test_bombs_are_left_out_unread(tmp_path):
    """DATA-2: what inflates a thousandfold, or lies about its size, is not inflated."""
    archive = Zip(write_zip(tmp_path / "a.zip", {"a.jpg": bytes(4 << 20)}, deflated=True))
    (record,) = archive.records()
    with pytest.raises(Defect) as bomb:
        archive.read(record)
    assert bomb.value.kind == "too large"
    with pytest.raises(Defect) as lie:
        archive.read(record._replace(size=1000))
    assert lie.value.kind == "broken"
    for large in (record._replace(size=1 << 40), record._replace(length=1 << 40)):
        with pytest.raises(Defect) as huge:
            Treatment(Resize(), upright=True).stored(large, archive)
        assert huge.value.kind == "too large"


def test_a_member_whose_own_entry_is_damaged_is_left_out(tmp_path):
    """Where no local header is, nothing is read."""
    path = write_zip(tmp_path / "a.zip", {"a.jpg": b"x"})
    path.write_bytes(path.read_bytes().replace(b"PK\3\4", b"PK\3\5", 1))
    archive = Zip(path)
    with pytest.raises(Defect) as defect:
        archive.read(next(archive.records()))
    assert defect.value.kind == "broken"


@given(data=st.binary(max_size=5000), change=st.integers(0, 10_000), value=st.integers(0, 255))
def test_damaged_deflate_never_passes_for_more_or_less(data, change, value):
    """Inflating gives exactly the promised number of bytes, or a defect."""
    deflate = zlib.compressobj(wbits=-15)
    packed = bytearray(deflate.compress(data) + deflate.flush())
    packed[change % len(packed)] = value
    try:
        assert len(inflated(bytes(packed), len(data))) == len(data)
    except Defect as defect:
        assert defect.kind == "broken"
