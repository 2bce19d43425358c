"""The shards are plain tars: common tools read them."""

import io
import json
import subprocess
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.lib.recfunctions
import pytest
from PIL import Image

from rackrun.shards.images import FORMATS
from rackrun.shards.index import brace_name
from tests.convert.conftest import Convert, manifest_of
from tests.lab import warm
from tests.lab.data import drawn, every_sample, kaggle, textured, write_zip

STOCK = """
import json, sys, zlib, webdataset
found = {}
for urls in sys.argv[1:]:
    raw = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
    decoded = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False).decode("pil")
    for sample, image in zip(raw, decoded, strict=True):
        size, label = image["jpg"].size, image["cls"]
        found[sample["__key__"]] = [label, "jpg", zlib.crc32(sample["jpg"]), *size]
    # what webdataset's own page shows first, to the letter
    shown = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
    shown = shown.decode("pil").to_tuple("jpg", "cls")
    assert [label for _, label in shown] == [
        image["cls"]
        for image in webdataset.WebDataset(urls, shardshuffle=False, empty_check=False).decode()
    ]
print(json.dumps(found))
"""

Expected = dict[str, tuple[int, str, bytes]]


@pytest.fixture
def folder(tmp_path: Path, convert: Convert) -> Path:
    """Return shards of both classes; in them large JPEGs, and every other format."""
    others = {
        f"train/cat.{90 + number}.jpg": drawn(name, format=name)
        for number, name in enumerate(("PNG", "GIF", "BMP", "WEBP"))
    }
    photos = {f"train/dog.{90 + number}.jpg": textured(number) for number in range(3)}
    files = kaggle(20) | others | photos
    source = write_zip(tmp_path / "train.zip", files)
    return convert("catdog", source, "--shards", 3)


def expected(folder: Path) -> Expected:
    """Return label, extension and bytes by key: each member is a .jpg, whatever its format."""
    return {sample.key: (sample.label, "jpg", sample.image) for sample in every_sample(folder)}


def test_stock_webdataset_reads_them_by_their_brace_name(folder):
    """webdataset's own pipeline finds every sample, its label and its image, and decodes it."""
    manifest = manifest_of(folder)
    urls = [str(folder / brace_name(split)) for split in manifest.splits]
    completed = warm.run("-c", STOCK, *urls)
    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout) == {
        key: [label, extension, crc32(image), *Image.open(io.BytesIO(image)).size]
        for key, (label, extension, image) in expected(folder).items()
    }


def test_gnu_tar_lists_and_unpacks_them(folder, tmp_path):
    """tar tvf lists every member without a warning, and tar xf gives the same bytes."""
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    for path in sorted(folder.glob("*.tar")):
        listed = subprocess.run(["tar", "tvf", path], capture_output=True, text=True, check=True)
        assert not listed.stderr
        assert all(line.startswith("-r--r--r-- 0/0 ") for line in listed.stdout.splitlines())
        subprocess.run(["tar", "xf", path, "-C", unpacked], check=True)
    for key, (label, extension, image) in expected(folder).items():
        assert (unpacked / f"{key}.cls").read_text() == str(label)
        assert (unpacked / f"{key}.{extension}").read_bytes() == image


def test_the_index_gives_every_image_without_the_tar(folder):
    """numpy maps the index; each row's bytes are an image of the size that it says."""
    for split in manifest_of(folder).splits:
        rows = np.load(folder / split.index, mmap_mode="r")
        assert isinstance(rows, np.memmap)
        for row in rows:
            tar = (folder / split.shards[row["shard"]].name).read_bytes()
            start = row["image_offset"]
            image = Image.open(io.BytesIO(tar[start : start + row["image_length"]]))
            assert image.size == (row["width"], row["height"])
            assert row["format"].decode() == FORMATS[str(image.format)]
