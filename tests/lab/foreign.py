"""Archives and images as other programs write them, and what a shard folder holds."""

import json
import struct
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

IMAGES = ("jpg", "jpeg", "png", "gif", "bmp", "webp", "tif", "tiff", "avif", "ppm")


def classes(folder: Path) -> list[str]:
    """Return the classes of a shard folder."""
    return list(json.loads((folder / "dataset.json").read_text())["classes"])


def count(folder: Path) -> int:
    """Return the number of images of a shard folder, of all splits."""
    splits = json.loads((folder / "dataset.json").read_text())["splits"]
    return sum(split["samples"] for split in splits)


def stored(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield key and bytes of every image in the tars of a shard folder."""
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, suffix = member.name.rpartition(".")
                file = tar.extractfile(member)
                if file and suffix.lower() in IMAGES:
                    yield key, file.read()


def zip_without_zip64(members: Iterable[tuple[bytes, bytes]], made_by: int = 0x0315) -> bytes:
    """Return a zip of (name, data) whose end counts entries modulo 65,536, as macOS writes it.

    Names are bytes: nothing says in which encoding they are.
    """
    body, table, entries = bytearray(), bytearray(), 0
    for name, data in members:
        sizes = zlib.crc32(data), len(data), len(data), len(name)
        record = struct.pack("<HHHHHLLLHH", 20, 0, 0, 0, 0x5821, *sizes, 0)
        rest = struct.pack("<HHHLL", 0, 0, 0, 0o100644 << 16, len(body))
        table += b"PK\1\2" + struct.pack("<H", made_by) + record + rest + name
        body += b"PK\3\4" + record + name + data
        entries += 1
    counts = entries & 0xFFFF, entries & 0xFFFF
    end = struct.pack("<4sHHHHLLH", b"PK\5\6", 0, 0, *counts, len(table), len(body), 0)
    return bytes(body + table + end)


def tiny_gif(number: int) -> bytes:
    """Return a GIF of 2 x 2 pixels, another one for each number."""
    red, green, blue = number & 255, number >> 8 & 255, number >> 16 & 255
    palette = bytes((red, green, blue, 255 - red, green, blue))
    return b"GIF89a\2\0\2\0\x80\0\0" + palette + b",\0\0\0\0\2\0\2\0\0\2\2\x84Q\0;"


def png(pixels: bytes, size: tuple[int, int], *before: bytes) -> bytes:
    """Return an RGB PNG of these compressed pixels; chunks may go before its header."""
    header = struct.pack(">LLBBBBB", *size, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(before) + chunks


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG."""
    return struct.pack(">L", len(data)) + kind + data + struct.pack(">L", zlib.crc32(kind + data))
