"""Facts about an image from its bytes: format, size in pixels, and everything odd.

Every image is decoded, because nothing less tells whether the loader can: a JPEG at an eighth of
its size by libjpeg-turbo, which names damage that Pillow passes over, all others by Pillow. An
image is left out because it cannot be decoded, never because it looks unusual.
"""

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rackrun.convert.readers.records import (
    IMAGE_SUFFIXES,
    LOSSES,
    REENCODED_SUFFIXES,
    Defect,
    ImageDefect,
)
from rackrun.shards.images import (
    END,
    FORMATS,
    MAX_PIXELS,
    MAX_SCANS,
    START,
    UNDECODABLE,
    jpeg_frame,
    scans,
    too_large,
)

if TYPE_CHECKING:
    from PIL import Image

LEFT_OUT = LOSSES | {
    "ignored": "not an image, by their names",
    "system": "folders that a NAS or the system creates, with their contents",
    "excluded": "files and folders that --exclude names",
    "unlabeled": "of no class",
    "replaced": "replaced by a later member of the same name in the archive",
    "heic": "HEIC, which needs pillow-heif: pip install pillow-heif, or convert them to JPEG",
    "no image": "samples without an image",
}
KEPT = {
    "leak": "identical to an image in another split",
    "two classes": "identical to an image in another class",
    "copy": "identical to another image",
    "other format": "in another format than their name says; the bytes decide",
    "cmyk": "CMYK; converted to RGB when decoded",
    "gray": "gray; converted to RGB when decoded",
    "rotated": "rotated by EXIF or XMP, which is ignored, as in the published baselines",
    "turned": "turned upright by EXIF or XMP; encoded again as JPEG",
    "re-encoded": "TIFF, AVIF, HEIC or PPM; encoded again as JPEG",
    "animated": "animated; only the first image is used",
    "transparent": "transparent; transparency is dropped",
    "16 bits": "of 16 bits per channel; only the upper 8 are used",
    "dark": "of 16 bits per channel with values below 2^14: dark, with at most 64 levels",
    "no end": "without an end marker, but decoded in full",
    "warnings": "decoded with warnings: a part of the image may be damaged",
}

PNG, PNG_END, PNG_DEPTH_AT = b"\x89PNG\r\n\x1a\n", b"IEND", 24
LFS = b"version https://git-lfs."  # what a clone has in place of a file that it did not fetch
HEIC_BOX, HEIC_BRANDS = b"ftyp", (b"heic", b"heix", b"heim", b"mif1", b"msf1")  # from byte 4 on
GRAY_MODES = ("1", "L", "LA", "I;16", "I;16B", "I")


@dataclass
class ImageInfo:
    """Format, size and peculiarities of an image."""

    extension: str = ""
    """Empty for a format that no shard has."""
    width: int = 0
    height: int = 0
    oddities: tuple[str, ...] = ()
    """Kinds of KEPT that apply."""
    orientation: int = 1
    """The orientation by EXIF or XMP; 1: upright."""


def inspect(
    data: bytes, suffix: str, foreign: Sequence[str] = (), shrinks: bool = False
) -> ImageInfo:
    """Inspect and decode an image; raise Defect if it cannot be used.

    `suffix` is that of its name, if any; `foreign` are more formats, as Pillow calls them, to read.
    With `shrinks` it will be stored much smaller, so that a JPEG may be larger than a stored one.
    """
    if not data:
        raise Defect("empty")
    image = _opened(data, foreign)
    extension = "jpg" if data.startswith(START) else FORMATS.get(image.format or "", "")
    _refuse_size(*image.size, shrinks and extension == "jpg")
    oddities = _decoded_jpeg(data, image.mode) if extension == "jpg" else _decoded(data, image)
    # Only now: the EXIF of a PNG may follow its pixels.
    from rackrun.shards.pillow import orientation

    turn = orientation(image)
    oddities += ["rotated"] * (turn > 1)
    known = (*IMAGE_SUFFIXES, *REENCODED_SUFFIXES)
    if suffix.lower() in known and extension and IMAGE_SUFFIXES.get(suffix.lower()) != extension:
        oddities.insert(0, "other format")
    return ImageInfo(extension, *image.size, tuple(oddities), turn)


def reason(error: Exception) -> str:
    """Return why Pillow cannot decode an image, for the quality report."""
    from PIL import UnidentifiedImageError

    # Pillow's own text would be the address of the buffer that we have read the image into.
    return "not recognized" if isinstance(error, UnidentifiedImageError) else str(error)


def findings_of(name: str, info: ImageInfo, usual: Sequence[str] = ()) -> list[ImageDefect]:
    """Return the lines that a usable image adds to the quality report, but for `usual` kinds."""
    return [
        ImageDefect(name, kind, f"is {info.extension}" if kind == "other format" else "")
        for kind in info.oddities
        if kind not in usual
    ]


def _opened(data: bytes, foreign: Sequence[str]) -> "Image.Image":
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings(action="ignore"):
            return Image.open(io.BytesIO(data), formats=(*FORMATS, *foreign))
    except UnidentifiedImageError:
        if data[4:8] == HEIC_BOX and data[8:12] in HEIC_BRANDS and "HEIF" not in foreign:
            raise Defect("heic") from None
        if data.startswith((START, PNG)):
            raise _undecodable(data, "its header is damaged") from None
        what = "a pointer of Git LFS: type git lfs pull" if data.startswith(LFS) else ""
        raise Defect("unknown format", what or f"begins with {data[:8]!r}") from None
    except Image.DecompressionBombError:
        raise Defect("too large", "more pixels than any real image has") from None
    except UNDECODABLE as error:
        raise _undecodable(data, reason(error)) from None


def _refuse_size(width: int, height: int, is_shrunk_jpeg: bool) -> None:
    from rackrun.shards.pillow import LARGEST_SHRUNK

    if not width or not height:
        raise Defect("undecodable", f"{width}x{height} pixels")
    is_photograph = is_shrunk_jpeg and width * height <= LARGEST_SHRUNK
    if not too_large(width, height) or (is_photograph and not too_large(width // 8, height // 8)):
        return
    size = f"{width}x{height} pixels"
    if width * height > MAX_PIXELS:
        size += f", over {MAX_PIXELS / 1e6:.0f} million"
    if MAX_PIXELS < width * height <= LARGEST_SHRUNK:
        size += "; --short-side or --size admits such JPEGs"
    raise Defect("too large", size)


def _decoded_jpeg(data: bytes, mode: str) -> list[str]:
    """Decode a JPEG at an eighth of its size; return what is odd about it."""
    frame = jpeg_frame(data)
    # Only a JPEG of several scans can have so many that a training step would wait for it.
    if not (frame and frame.one_scan) and (count := scans(data)) > MAX_SCANS:
        raise Defect("too large", f"{count:,} scans")
    oddities = {"L": ["gray"], "CMYK": ["cmyk"]}.get(mode, [])
    is_clean = _decodes_without_warning(data, "CMYK" if mode == "CMYK" else "GRAY")
    if is_clean and frame:
        return oddities
    # The loader leaves to Pillow what libjpeg-turbo warns of, and all that is no usual frame.
    _decoded(data, _opened(data, ()))
    if not is_clean:
        oddities = [*oddities, "no end" if _is_cut(data) else "warnings"]
    return oddities


def _decodes_without_warning(jpeg: bytes, colors: str) -> bool:
    import simplejpeg

    try:
        simplejpeg.decode_jpeg(jpeg, colors, min_height=1, min_width=1, min_factor=8, strict=True)
    except ValueError:
        return False
    return True


def _decoded(data: bytes, image: "Image.Image") -> list[str]:
    """Decode an image by Pillow, a JPEG at an eighth of its size; return what is odd about it."""
    from rackrun.shards.pillow import FEW_LEVELS, levels_left

    try:
        with warnings.catch_warnings(record=True, action="always") as said:
            image.draft(None, (1, 1))
            image.load()
    except UNDECODABLE as error:
        raise _undecodable(data, reason(error)) from None
    is_deep = image.mode.startswith("I") or (data.startswith(PNG) and data[PNG_DEPTH_AT] == 16)
    is_transparent = image.mode in ("LA", "RGBA", "PA") or "transparency" in image.info
    kinds = {
        "16 bits": is_deep,
        "dark": is_deep and levels_left(image) <= FEW_LEVELS,
        "gray": image.mode in GRAY_MODES,
        "transparent": is_transparent,
        "animated": getattr(image, "is_animated", False),
        "warnings": bool(said),
        "no end": _is_cut(data),
    }
    return [kind for kind, applies in kinds.items() if applies]


def _undecodable(data: bytes, why: str) -> Defect:
    if _is_cut(data):
        return Defect("truncated", f"ends after {len(data):,} bytes")
    return Defect("undecodable", why)


def _is_cut(data: bytes) -> bool:
    """Return True for a JPEG or a PNG that lacks its end."""
    if data.startswith(START):
        frame = jpeg_frame(data)
        return data.find(END, frame.scan_at if frame else len(START)) < 0
    return data.startswith(PNG) and PNG_END not in data[-12:]
