"""Images of every kind that decoders meet, and what each shows: all that ever went wrong."""

import io
import os
import struct
import tarfile
import warnings
import zlib
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pillow_heif
from PIL import Image, ImageOps, PngImagePlugin

from tests.lab.data import encoded, photograph
from tests.lab.foreign import chunk, png

PILLOW_SOURCES = "PILLOW_SOURCES"  # variable: a source distribution of Pillow, pillow-12.0.0.tar.gz
ORIENTATION = 0x0112
SIDE = 40  # pixels: a square, so that every reader can show it whole
TURNED_BACK = {  # by orientation: how an upright image lies in the file
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
TURNING_FORMATS = {"png": "PNG", "webp": "WEBP", "tif": "TIFF", "avif": "AVIF"}  # in their EXIF

PngImagePlugin.MAX_TEXT_CHUNK = 64 << 20  # Pillow's own limit of text hides whole images


class Exhibit(NamedTuple):
    """The bytes of a file, and what it shows upright, uint8 (h, w, 3); None: left out by name."""

    data: bytes
    shown: np.ndarray | None = None


def zoo() -> dict[str, Exhibit]:
    """Return at least one file of each kind, whole and broken, by name."""
    pillow_heif.register_heif_opener()
    return {**_whole(), **_turned(), **_deep(), **_broken()}


def pillows() -> dict[str, bytes]:
    """Return the files with which Pillow tests itself, but for programs, by name.

    They come from its source distribution, if PILLOW_SOURCES names one; else there are none.
    """
    path = os.environ.get(PILLOW_SOURCES)
    files = dict[str, bytes]()
    if not path:
        return files
    with tarfile.open(Path(path)) as tar:
        for member in tar:
            name = PurePosixPath(member.name)
            if member.isreg() and name.parts[1] == "Tests" and name.suffix != ".py":
                file = tar.extractfile(member)
                assert file
                files["__".join(name.parts[2:])] = file.read()
    return files


def as_pillow_shows(data: bytes) -> np.ndarray:
    """Return the first image of a file upright in RGB; of 16 bits, the upper 8."""
    with warnings.catch_warnings(action="ignore"):
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        if image.mode.startswith("I;16"):
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return np.asarray(image.convert("RGB"))


def is_alike(shown: np.ndarray, meant: np.ndarray) -> bool:
    """Return whether an image can be a copy, encoded again in good quality."""
    return shown.shape == meant.shape and np.abs(shown.astype(int) - meant).mean() < 4


def _picture() -> Image.Image:
    small = photograph(4, SIDE // 4, SIDE // 4)
    return small.resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def _whole() -> dict[str, Exhibit]:
    picture = _picture()
    gray, bits, palette = picture.convert("L"), picture.convert("1"), picture.quantize()
    cmyk, clear = picture.convert("CMYK"), picture.convert("RGBA")
    more: dict[str, Any] = {"save_all": True, "append_images": [picture.rotate(90)]}
    jpeg = encoded(picture, quality=95)
    with_text = PngImagePlugin.PngInfo()
    with_text.add_itxt("XML:com.adobe.xmp", "".join(map(str, range(300_000))), zip=True)
    files = {
        "baseline.jpg": (jpeg, picture),
        "progressive.jpg": (encoded(picture, quality=95, progressive=True), picture),
        "gray.jpg": (encoded(gray, quality=95), gray),
        "cmyk.jpg": (encoded(cmyk, quality=95), cmyk),
        "trailing.jpg": (jpeg + b"more", picture),
        "no-end.jpg": (jpeg[:-2] + bytes(5000), picture),
        "two.mpo": (encoded(picture, "MPO", quality=95, **more), picture),
        "browser.jfif": (jpeg, picture),
        "color.png": (encoded(picture, "PNG"), picture),
        "gray.png": (encoded(gray, "PNG"), gray),
        "bits.png": (encoded(bits, "PNG"), bits),
        "palette.png": (encoded(palette, "PNG"), palette),
        "key.png": (encoded(palette, "PNG", transparency=3), palette),
        "clear.png": (encoded(clear, "PNG"), picture),
        "gray-clear.png": (encoded(clear.convert("LA"), "PNG"), gray),
        "moving.png": (encoded(picture, "PNG", **more), picture),
        "history.png": (encoded(picture, "PNG", pnginfo=with_text), picture),
        "no-end.png": (encoded(picture, "PNG")[:-12], picture),
        "palette.gif": (encoded(palette, "GIF"), palette),
        "color.bmp": (encoded(picture, "BMP"), picture),
        "gray.bmp": (encoded(gray, "BMP"), gray),
        "exact.webp": (encoded(picture, "WEBP", lossless=True), picture),
        "moving.webp": (encoded(picture, "WEBP", lossless=True, **more), picture),
        "color.tif": (encoded(picture, "TIFF"), picture),
        "gray.tif": (encoded(gray, "TIFF", compression="tiff_lzw"), gray),
        "cmyk.tif": (encoded(cmyk, "TIFF"), cmyk),
        "color.avif": (encoded(picture, "AVIF", quality=95), picture),
        "color.heic": (encoded(picture, "HEIF", quality=95), picture),
        "color.ppm": (encoded(picture, "PPM"), picture),
        "gray.pgm": (encoded(gray, "PPM"), gray),
        "bits.pbm": (encoded(bits, "PPM"), bits),
        "png-inside.jpg": (encoded(picture, "PNG"), picture),
        "tiff-inside.png": (encoded(picture, "TIFF"), picture),
    }
    return {
        name: Exhibit(data, np.asarray(image.convert("RGB")))
        for name, (data, image) in files.items()
    }


def _turned() -> dict[str, Exhibit]:
    """Return files that lie on their sides and say so, in EXIF or XMP."""
    picture = _picture()
    files = {"exif-9.jpg": Exhibit(encoded(picture, quality=95, exif=_exif(9)))}
    for orientation in range(1, 9):
        name, lying = f"exif-{orientation}.jpg", _lying(picture, orientation)
        files[name] = Exhibit(encoded(lying, quality=95, exif=_exif(orientation)))
    lying = _lying(picture, 6)
    for suffix, form in TURNING_FORMATS.items():
        files[f"exif.{suffix}"] = Exhibit(encoded(lying, form, quality=95, exif=_exif(6)))
    long = b"Exif\0\0MM\0*" + struct.pack(">LHHHLLL", 8, 1, ORIENTATION, 4, 1, 6, 0)
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="6"/></x:xmpmeta>'
    files["exif-long.jpg"] = Exhibit(encoded(lying, quality=95, exif=long))
    files["xmp.jpg"] = Exhibit(encoded(lying, quality=95, xmp=xmp))
    return {name: each._replace(shown=np.asarray(picture)) for name, each in files.items()}


def _lying(picture: Image.Image, orientation: int) -> Image.Image:
    return picture.transpose(TURNED_BACK[orientation]) if orientation > 1 else picture


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def _deep() -> dict[str, Exhibit]:
    """Return files of 16 bits a channel, whose lower 8 are noise."""
    picture = _picture()
    gray, color = np.asarray(picture.convert("L")), np.asarray(picture)
    noise = np.random.default_rng(1).integers(256, size=color.shape)
    deep = (color.astype(np.uint16) << 8) + noise.astype(np.uint16)
    deep_gray = (gray.astype(np.uint16) << 8) + noise[..., 0].astype(np.uint16)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in deep)
    header = struct.pack(">LLBBBBB", SIDE, SIDE, 16, 2, 0, 0, 0)
    pixels, end = chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    color_png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + end
    shown = np.repeat(gray[..., None], 3, axis=2)
    return {
        "deep.png": Exhibit(encoded(Image.fromarray(deep_gray), "PNG"), shown),
        "deep-color.png": Exhibit(color_png, color),
        "deep.tif": Exhibit(encoded(Image.fromarray(deep_gray), "TIFF"), shown),
    }


def _broken() -> dict[str, Exhibit]:
    """Return files that no reader can show whole, or should not."""
    picture = _picture()
    jpeg, whole_png = encoded(picture, quality=95), encoded(picture, "PNG")
    packed = zlib.compress(b"".join(b"\0" + row.tobytes() for row in np.asarray(picture)))
    floats = Image.fromarray(np.ones((SIDE, SIDE), np.float32))
    size = (SIDE, SIDE)
    files = {
        "empty.jpg": b"",
        "page.jpg": b"<html>not found</html>",
        "half.jpg": jpeg[: len(jpeg) // 2],
        "start.jpg": jpeg[:2] + bytes(5000),
        "scanless.jpg": b"\xff\xd8\xff\xda\0\2\xff\xd9",
        "half.png": whole_png[: len(whole_png) // 2],
        "half-inside.png": png(packed[: len(packed) // 2], size),
        "xcode.png": png(packed[2:-4], size, chunk(b"CgBI", b"\x50\0\x20\2")),
        "bomb.png": png(packed, (9000, 9000)),
        "line.png": png(packed, (1, 60_000)),
        "nothing.png": png(packed, (0, 10)),
        "half.gif": encoded(picture.quantize(), "GIF")[:100],
        "half.tif": encoded(picture, "TIFF")[:200],
        "half.avif": encoded(picture, "AVIF")[:200],
        "floats.tif": encoded(floats, "TIFF"),
        "icon.png": encoded(picture, "ICO"),
        "drawing.jpg": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
        "paper.jpg": b"%PDF-1.7\n",
        "stars.jpg": b"SIMPLE  =                    T",
    }
    return {name: Exhibit(data) for name, data in files.items()}
