"""An image is left out because it cannot be decoded, never because it looks unusual."""

import json
import random
import re
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from rackrun.convert.__main__ import main
from rackrun.convert.images.info import inspect
from rackrun.convert.readers.records import Defect
from rackrun.shards.images import MAX_SCANS
from tests.lab.data import drawn, encoded, every_sample, kaggle, rotated, write_zip
from tests.lab.oracles import text_only

JPEG = drawn("jpeg", (200, 150))
PROGRESSIVE = drawn("jpeg", (200, 150), progressive=True)
PNG = drawn("png", format="PNG")


def deep(step: int) -> bytes:
    """Return a gray PNG of 16 bits, of which a camera has filled 12, or all by steps of 16."""
    levels = np.arange(0, 4096 * step, step, dtype=np.uint16).reshape(64, 64)
    return encoded(Image.fromarray(levels), "PNG")


@pytest.mark.parametrize(
    ("data", "suffix", "oddities"),
    [
        (PNG, ".jpg", ("other format",)),
        (JPEG, ".PNG", ("other format",)),
        (JPEG, ".JPEG", ()),
        (drawn(1, mode="L"), ".jpg", ("gray",)),
        (drawn(1, mode="CMYK"), ".jpg", ("cmyk",)),
        (drawn(1, mode="L", format="PNG"), ".png", ("gray",)),
        (drawn(1, mode="RGBA", format="PNG"), ".png", ("transparent",)),
        (deep(step=16), ".png", ("16 bits", "gray")),
        (deep(step=1), ".png", ("16 bits", "dark", "gray")),
        *((rotated(1, turn), ".jpg", ("rotated",)) for turn in range(2, 9)),
        (rotated(1, 1), ".jpg", ()),
        (rotated(1, 99), ".jpg", ()),
        (JPEG[:-2] + bytes(5000), ".jpg", ("no end",)),
        (JPEG + b"trailing bytes", ".jpg", ()),
    ],
)
def test_oddities_are_noted_and_kept(data, suffix, oddities):
    """Another format, gray, CMYK, transparency, EXIF rotation: in the report, and in the shard."""
    assert inspect(data, suffix).oddities == oddities


def of_scans(count: int) -> bytes:
    """Return a progressive JPEG with this many scans of its last details."""
    last = PROGRESSIVE.rindex(b"\xff\xda")
    return PROGRESSIVE[:last] + PROGRESSIVE[last:-2] * count + PROGRESSIVE[-2:]


@pytest.mark.parametrize("decoy", [b"", b"\xff\xfe\0\4\xff\xd9"])
def test_a_jpeg_of_too_many_scans_is_left_out_unread(decoy):
    """DATA-3: a scan costs the loader as much as an image; an end marker in a comment hides none.

    A progressive image of the usual dozen of scans is kept.
    """
    data = of_scans(MAX_SCANS + 1)
    at = data.index(b"\xff\xda")
    with pytest.raises(Defect) as defect:
        inspect(data[:at] + decoy + data[at:], ".jpg")
    assert defect.value.kind == "too large" and "scans" in defect.value.detail
    assert not inspect(PROGRESSIVE, ".jpg").oddities


def test_what_decodes_only_with_a_warning_is_noted():
    """Noise in the scan is drawn as noise: the report says so, and the image is kept."""
    noisy = bytearray(drawn("noise", (400, 300)))
    middle = noisy.index(b"\xff\xda") + 700
    noisy[middle : middle + 60] = random.Random(1).randbytes(60).replace(b"\xff", b"\xfe")
    noisy[middle + 60 : middle + 62] = b"\xff\xd0"
    assert inspect(bytes(noisy), ".jpg").oddities == ("warnings",)
    for mode in ("RGB", "L", "CMYK"):
        assert "warnings" not in inspect(drawn(1, mode=mode), ".jpg").oddities


def test_the_report_names_every_odd_file(tmp_path, convert, capsys):
    """Broken images are left out, counted and named, on the screen and in report.json."""
    odd = {
        "train/cat.900.jpg": b"",
        "train/cat.901.jpg": JPEG[:-500],
        "train/cat.902.jpg": PNG,
        "train/cat.903.jpg": drawn(1, mode="CMYK"),
        "train/dog.904.jpg": rotated(1),
        "train/\x1b[2Jdog.jpg": b"?",
        "Thumbs.db": b"?",
    }
    out = convert("catdog", write_zip(tmp_path / "train.zip", kaggle(5) | odd))
    printed = capsys.readouterr().out
    assert "13 images stored, all of them decoded" in printed
    assert "left out: 1 cut off: train/cat.901.jpg" in printed
    assert "left out: 1 not an image, by their names (.db 1): Thumbs.db" in printed
    text_only(printed)
    report = json.loads((out / "report.json").read_text())
    assert report["pictures"] == 13 and report["left_out"] == 4
    main(["summary", str(out)])
    counts = re.findall(r"^(left out|kept): (\d+) ", capsys.readouterr().out, re.MULTILINE)
    assert Counter(what for what, _ in counts) == {"left out": 4, "kept": 3}
    names = {each["file"]: (each["found"], each["done"]) for each in report["findings"]}
    assert names == {
        "train/cat.900.jpg": ("empty", "left out"),
        "train/cat.901.jpg": ("truncated", "left out"),
        "train/cat.902.jpg": ("other format", "kept"),
        "train/cat.903.jpg": ("cmyk", "kept"),
        "train/dog.904.jpg": ("rotated", "kept"),
        "train/\x1b[2Jdog.jpg": ("unlabeled", "left out"),
        "Thumbs.db": ("ignored", "left out"),
    }
    by_key = {sample.key: sample for sample in every_sample(out)}
    assert by_key["cat_00902"].extension == "png" and by_key["cat_00902"].image == PNG


def test_damage_that_the_archive_knows_of_is_found(tmp_path, convert):
    """A flipped byte in a stored image decodes without an error; the CRC-32 finds it."""
    source = write_zip(tmp_path / "train.zip", kaggle(5))
    data = bytearray(source.read_bytes())
    data[data.index(b"train/cat.3.jpg") + 700] ^= 1
    source.write_bytes(data)
    out = convert("catdog", source)
    (finding,) = json.loads((out / "report.json").read_text())["findings"]
    assert (finding["file"], finding["found"]) == ("train/cat.3.jpg", "checksum")
    assert len(every_sample(out)) == 9
