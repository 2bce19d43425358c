"""Facts about an image from its bytes: format, size in pixels, and everything odd.

A JPEG or PNG of the usual kind is judged by its structure alone, in some 10 microseconds. Whatever
that cannot settle (other formats, missing end markers, rare coding processes, a JPEG whose header
is like none before) is decoded: an image is left out because it cannot be decoded, never because it
looks unusual.
"""

import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from convert.readers.records import IMAGE_SUFFIXES, LOSSES, Defect, ImageDefect
from shards.images import FORMATS, MAX_SCANS, UNDECODABLE, scans, too_large

if TYPE_CHECKING:
    from PIL import Image

LEFT_OUT = LOSSES | {
    "ignored": "not an image by its name",
    "system": "folders that a NAS or the system makes, with all that is in them",
    "unlabelled": "of no class",
    "replaced": "replaced by a later member of the same name in the archive",
    "heic": "HEIC, which only pillow-heif reads: pip install pillow-heif, or make them JPEGs",
    "no image": "samples without an image",
}
KEPT = {
    "leak": "exact copies of images in another split",
    "two classes": "exact copies of images in another class",
    "copy": "exact copies of other images",
    "other format": "in another format than that of their name; readers go by their bytes",
    "cmyk": "CMYK; become RGB when they are decoded",
    "gray": "gray; become RGB when they are decoded",
    "rotated": "rotated by EXIF, which is ignored as the published baselines do",
    "turned": "turned upright as EXIF says; encoded again as JPEG of quality 95",
    "re-encoded": "TIFF, AVIF or HEIC; encoded again as JPEG of quality 95",
    "animated": "animated; the first image counts",
    "transparent": "transparent; transparency is dropped",
    "16 bits": "of 16 bits a channel; the upper 8 count",
    "no end": "without an end marker, yet decode in full",
    "warnings": "decode with warnings: a part of the image may be damaged",
}

JPEG, PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
HUFFMAN, QUANTIZATION = 0xC4, 0xDB
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
REMARKS = {*range(0xE0, 0xF0), 0xFE}  # APPn and COM, which no decoding depends on
TABLE_SLOTS = 4  # for tables of a kind
CODE_LENGTHS = 16  # bits of the longest code
MOST_CODES, DC_SYMBOLS = 256, 16
USUAL_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive; all with Huffman codes
PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
SCAN, END, APP1 = 0xDA, 0xD9, 0xE1
GARBAGE = 0x00  # no marker has this number
ALONE = (0x01, *range(0xD0, 0xD8))  # markers without a length
ORIENTATION = 0x0112

HeaderPart = tuple[int, bytes]
"""A marker, and what in its segment a decoder may refuse."""


@dataclass
class ImageInfo:
    """Format, size and peculiarities of an image."""

    extension: str = ""
    width: int = 0
    height: int = 0
    oddities: tuple[str, ...] = ()
    """Kinds of KEPT that apply."""
    settled: bool = True
    """True if its structure alone proves that the image is whole."""
    header: tuple[HeaderPart, ...] = ()
    """Of a JPEG: what its decoding depends on besides its pixels."""


_PROVEN: set[tuple[HeaderPart, ...]] = set()
"""Headers of JPEGs that were decoded in this process: those of most others are the same."""
MOST_PROVEN = 10_000


def inspect(data: bytes, suffix: str, decode: bool = False) -> ImageInfo:
    """Inspect an image; raise Defect if it cannot be used. `suffix` is that of its name, if any."""
    info = _parsed(data)
    if not info.width or not info.height:
        raise Defect("broken", f"{info.width}x{info.height} pixels")
    if too_large(info.width, info.height):
        raise Defect("too large", f"{info.width}x{info.height} pixels")
    is_clean = decode and info.extension == "jpg" and _decodes_without_warning(data)
    if (decode or not info.settled) and not is_clean:
        _check_decodes(data, "truncated" if "no end" in info.oddities else "undecodable")
        if info.header and len(_PROVEN) < MOST_PROVEN:
            _PROVEN.add(info.header)
        if decode and info.extension == "jpg" and "no end" not in info.oddities:
            info.oddities += ("warnings",)
    if suffix and IMAGE_SUFFIXES.get(suffix.lower()) != info.extension:
        info.oddities = ("other format", *info.oddities)
    return info


def reason(error: Exception) -> str:
    """Return why Pillow cannot decode an image, for the quality report."""
    from PIL import UnidentifiedImageError

    # Pillow's own text would be the address of the buffer that we have read the image into.
    return "not recognized" if isinstance(error, UnidentifiedImageError) else str(error)


def findings(name: str, info: ImageInfo) -> list[ImageDefect]:
    """Return the lines that a usable image adds to the quality report."""
    return [
        ImageDefect(name, kind, f"is {info.extension}" if kind == "other format" else "")
        for kind in info.oddities
    ]


def _check_decodes(data: bytes, failure: str) -> None:
    try:
        with warnings.catch_warnings(action="ignore"), _opened(data) as image:
            image.draft(None, (1, 1))  # at an eighth of its size, which costs least
            image.load()
    except UNDECODABLE as error:
        raise Defect(failure, reason(error)) from None


def _decodes_without_warning(jpeg: bytes) -> bool:
    import simplejpeg

    try:
        simplejpeg.decode_jpeg(jpeg, "GRAY", min_height=1, min_width=1, min_factor=8, strict=True)
    except ValueError as error:
        return "Unsupported color" in str(error)  # CMYK, which it does not convert to gray
    return True


def _parsed(data: bytes) -> ImageInfo:
    if not data:
        raise Defect("empty")
    try:
        if data.startswith(JPEG):
            return _inspect_jpeg(data)
        if data.startswith(PNG):
            return _inspect_png(data)
    except (IndexError, struct.error):
        raise Defect("truncated", f"ends after {len(data):,} bytes") from None
    return _inspect_other(data)


def _inspect_jpeg(data: bytes) -> ImageInfo:
    """Read the segments before the first scan, and look for the end marker after it."""
    info, oddities, at = ImageInfo("jpg"), [], 0
    channels, progressive = 0, False
    header: list[HeaderPart] = []
    for marker, at, length in _segments(data):
        if marker in FRAMES:
            precision, info.height, info.width, channels = struct.unpack_from(">BHHB", data, at + 4)
            info.settled &= marker in USUAL_FRAMES and precision == 8
            progressive |= marker in PROGRESSIVE
            oddities += {1: ["gray"], 4: ["cmyk"]}.get(channels, [])
        elif marker == APP1 and data[at + 4 : at + 10] == b"Exif\0\0":
            oddities += ["rotated"] * (_orientation(data[at + 10 : at + 2 + length]) > 1)
        elif marker == GARBAGE:
            info.settled = False
        if marker not in REMARKS:
            header.append(_header_part(marker, data[at + 4 : at + 2 + length]))
    if not info.width:
        raise Defect("broken", "no frame before its first scan")
    # Only a JPEG of several scans can have so many that a training step would wait for it.
    if (progressive or data[at + 4] != channels) and (count := scans(data)) > MAX_SCANS:
        raise Defect("too large", f"{count:,} scans")
    if not data.endswith(b"\xff\xd9") and data.find(b"\xff\xd9", at) < 0:
        info.settled = False
        oddities.append("no end")
    info.header = tuple(header)
    info.settled &= info.header in _PROVEN
    info.oddities = tuple(oddities)
    return info


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield marker, offset and length of each JPEG segment to the first scan (ITU-T T.81, annex B).

    Bytes between two segments, which decoders skip, come as one of GARBAGE.
    """
    at, marker = 2, GARBAGE
    while marker != SCAN:
        if data[at] != 0xFF or data[at + 1] in (0x00, END):
            following = data.find(b"\xff", at + 1)
            yield GARBAGE, at, following - at
            at = following if following >= 0 else len(data)
        elif data[at + 1] == 0xFF:  # a segment may begin with any number of these
            at += 1
        else:
            marker = data[at + 1]
            length = 0 if marker in ALONE else (data[at + 2] << 8) + data[at + 3]
            yield marker, at, length
            at += 2 + length


def _header_part(marker: int, segment: bytes) -> HeaderPart:
    # Sizes and the contents of tables are left out: what is left is the same for most images of a
    # data set, so that few have to be decoded. `segment` is what follows its length.
    if marker in (HUFFMAN, QUANTIZATION):
        return marker, _table_slots(marker, segment)
    if marker in FRAMES:
        return marker, segment[:1] + segment[5:]
    return marker, segment


@lru_cache(1024)  # most files have the same few tables
def _table_slots(marker: int, segment: bytes) -> bytes:
    """Return the classes and slots of a segment's tables; of a damaged one, all of it."""
    table_ids, at = bytearray(), 0
    while at < len(segment):
        kind, slot = divmod(segment[at], 16)
        size = 64 << kind if marker == QUANTIZATION else _huffman_size(segment, at + 1, kind)
        if kind > 1 or slot >= TABLE_SLOTS or not size:
            return segment
        table_ids.append(segment[at])
        at += 1 + size
    return bytes(table_ids) if at == len(segment) else segment


def _huffman_size(segment: bytes, at: int, kind: int) -> int:
    """Return the bytes of a Huffman table; 0 for one whose codes are no prefix code (annex C)."""
    counts = segment[at : at + CODE_LENGTHS]
    code = 0
    for length, count in enumerate(counts, start=1):
        code += count
        if code > 1 << length:
            return 0
        code <<= 1
    total = sum(counts)
    symbols = segment[at + CODE_LENGTHS : at + CODE_LENGTHS + total]
    sound = total <= MOST_CODES and (kind or all(symbol < DC_SYMBOLS for symbol in symbols))
    return CODE_LENGTHS + total if sound else 0


def _orientation(exif: bytes) -> int:
    """Return EXIF tag 0x0112; 1, upright, where it is missing or malformed."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None or len(exif) < 10:
        return 1
    (start,) = struct.unpack_from(f"{order}L", exif, 4)
    entries = exif[start : start + 2]
    count = struct.unpack(f"{order}H", entries)[0] if len(entries) == 2 else 0
    for at in range(start + 2, min(start + 2 + 12 * count, len(exif) - 11), 12):
        tag, _, _, value = struct.unpack_from(f"{order}HHLH", exif, at)
        if tag == ORIENTATION:
            return int(value) if 1 <= value <= 8 else 1
    return 1


def _inspect_png(data: bytes) -> ImageInfo:
    """Walk the chunks, each with its CRC (PNG specification, section 5)."""
    info, oddities, at, kind, has_pixels = ImageInfo("png"), [], len(PNG), b"", False
    while kind != b"IEND":
        length, kind = struct.unpack_from(">L4s", data, at)
        (crc,) = struct.unpack_from(">L", data, at + 8 + length)
        if zlib.crc32(data[at + 4 : at + 8 + length]) != crc:
            raise Defect("broken", f"its {kind.decode('latin-1')} chunk is damaged")
        if kind == b"IHDR":
            info.width, info.height, depth, colour = struct.unpack_from(">LLBB", data, at + 8)
            info.settled = depth in PNG_DEPTHS.get(colour, ())
            oddities += ["16 bits"] * (depth == 16) + ["gray"] * (colour in (0, 4))
            oddities += ["transparent"] * (colour in (4, 6))
        oddities += {b"acTL": ["animated"], b"tRNS": ["transparent"]}.get(kind, [])
        at += 12 + length
        has_pixels |= kind == b"IDAT"
    if not info.width:
        raise Defect("broken", "no header chunk")
    info.settled &= has_pixels
    info.oddities = tuple(oddities)
    return info


def _inspect_other(data: bytes) -> ImageInfo:
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings(action="ignore"), _opened(data) as image:
            oddities = ("animated",) * getattr(image, "is_animated", False)
            return ImageInfo(FORMATS[image.format or ""], *image.size, oddities, settled=False)
    except UnidentifiedImageError:
        raise Defect("unknown format", f"begins with {data[:8]!r}") from None
    except Image.DecompressionBombError:
        raise Defect("too large", "more pixels than an image has") from None
    except UNDECODABLE as error:
        raise Defect("broken", str(error)) from None


def _opened(data: bytes) -> "Image.Image":
    from PIL import Image

    return Image.open(io.BytesIO(data), formats=tuple(FORMATS))
