"""Fuzz targets of conversion: each takes any bytes and lets only undocumented errors out."""

import contextlib
import gzip
import os
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rackrun.convert import devkit
from rackrun.convert.imagenet import ImagenetPart, listing
from rackrun.convert.images.info import inspect
from rackrun.convert.images.treatment import Treatment
from rackrun.convert.readers.records import Defect, Record
from rackrun.convert.readers.tars import Tar
from rackrun.convert.readers.zips import Zip
from rackrun.errors import DataError, Problem
from rackrun.shards.pillow import foreign_formats
from rackrun.shards.resize import Resize
from tests.fuzz.decoders import decoder
from tests.lab.data import drawn, rotated, tar, zipped

TWO = {"a/cat.1.jpg": b"a" * 99, "b.jpg": b"b"}
TREATMENT = Treatment(Resize(size=8), upright=True)
HEADERS = (b"", b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"RIFF....WEBP")
EXIF = (
    b"\xff\xd8\xff\xe1%sExif\0\0%s\xff\xc0\0\x11\x08\0\x10\0\x10\3"
    + bytes(9)
    + b"\xff\xda\0\2\xff\xd9"
)


def headed(form: int) -> bytes:
    """Return a tar whose member has an extended header of that form before it."""
    info = tarfile.TarInfo("long" * 40)
    info.size = 9
    return info.tobuf(form) + b"x" * 9 + bytes(503 + 1024)


@decoder(*(zipped(TWO, how) for how in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))
def fuzz_zip(data: bytes) -> None:
    """Fuzz a zip: its table of contents, each member's header, its content, an inner archive."""
    with _file(data, ".zip") as path, contextlib.suppress(Problem):
        archive = Zip(path)
        members = (each for each in archive.records() if isinstance(each, Record))
        for number, member in enumerate(members):
            with contextlib.suppress(Defect):
                archive.read(member)
            if not number and member.size < 1 << 20:
                with contextlib.suppress(Defect):
                    archive.within(member, path.parent)


@decoder(tar({"a": b"1"}, "gnu"), headed(tarfile.PAX_FORMAT), headed(tarfile.GNU_FORMAT))
def fuzz_tar(data: bytes) -> None:
    """Fuzz a tar: its headers, extended ones too, and every member as a tar of its own."""
    with _file(data, ".tar") as path, path.open("rb") as file, contextlib.suppress(Problem):
        tar = Tar(path, file.fileno())  # by itself it is open as long as a conversion lasts
        for member in tar.members():
            with contextlib.suppress(DataError):
                list(tar.members(member))
            with contextlib.suppress(Defect):
                tar.read(member)


@decoder(
    *(drawn(1)[2:], drawn(1, progressive=True)[2:]),
    *(drawn(1, (16, 12), name) for name in ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF")),
)
def fuzz_picture(data: bytes) -> None:
    """Fuzz an image after the magic bytes of each format."""
    for header in HEADERS:
        _inspected(header + data)


@decoder(rotated(1)[12:100])
def fuzz_exif(data: bytes) -> None:
    """Fuzz the EXIF of a JPEG that is otherwise valid."""
    exif = data[:60_000]
    _inspected(EXIF % (struct.pack(">H", len(exif) + 8), exif))


@decoder(b"ILSVRC2012_val_00000001,n01440764 1 2 3 4\n")
def fuzz_solution(data: bytes) -> None:
    """Fuzz Kaggle's table of labels, with its header and as it comes."""
    _refused(devkit.solved, data)
    _refused(devkit.solved, b"ImageId,PredictionString\n" + data)


@decoder(b"1\n2\n")
def fuzz_ground_truth(data: bytes) -> None:
    """Fuzz the devkit's labels."""
    _refused(devkit.numbered, data)


@decoder(gzip.compress(tar({f"data/{devkit.GROUND_TRUTH}": b"1"}), mtime=0))
def fuzz_devkit(data: bytes) -> None:
    """Fuzz the file beside the images that has the name of the packed devkit."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / f"{devkit.DEVKIT}.tar.gz").write_bytes(data)
        _refused(lambda _: devkit.beside(folder, devkit.GROUND_TRUTH), data)
        (folder / "train" / "n01440764").mkdir(parents=True)
        with contextlib.suppress(Problem):
            list(listing(folder, ImagenetPart(subset=True)).records)


def _inspected(data: bytes) -> None:
    with contextlib.suppress(Defect):
        TREATMENT.encoded(data, inspect(data, ".jpg", foreign_formats(), shrinks=True))


def _refused(decode: Callable[[bytes], object], data: bytes) -> None:
    with contextlib.suppress(Problem):
        decode(data)


@contextlib.contextmanager
def _file(data: bytes, suffix: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / f"a{suffix}"
        path.write_bytes(data)
        try:
            yield path
        finally:  # archives stay open until their process ends
            for link in Path("/proc/self/fd").iterdir():
                with contextlib.suppress(OSError):
                    if link.readlink().is_relative_to(name):
                        os.close(int(link.name))
