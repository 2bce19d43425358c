"""ImageNet becomes shards: the images as they were, the odd ones named, resized on request."""

import json
import tarfile
from pathlib import Path

import pytest

from rackrun.convert import imagenet
from rackrun.convert.imagenet import Imagenet, ImagenetPart
from rackrun.convert.options import Packing
from rackrun.errors import DataError
from rackrun.shards.open import open_source
from rackrun.shards.samples import Sample
from tests.lab.data import every_sample

FEW = Packing(shards=3, workers=2)
PART = ImagenetPart(subset=True)


def contents(folder: Path) -> dict[str, Sample]:
    """Return every verified sample of a shard folder."""
    return {sample.key: sample for sample in every_sample(folder)}


def test_shards_hold_the_original_bytes_under_the_right_labels(small_imagenet, tmp_path):
    """From the tar of tars to shards: bytes, labels, splits, .jpg for all members, the PNG too. The
    report names that one, the CMYK and the gray one."""
    source, out = small_imagenet.archives(tmp_path / "raw"), tmp_path / "out"
    Imagenet(source, out, choice=PART, packing=FEW).run()
    content = contents(out)
    originals = {path.stem: path for path in small_imagenet.train + small_imagenet.val}
    assert content.keys() == originals.keys()
    for key, sample in content.items():
        assert sample.image == originals[key].data
        assert small_imagenet.wnids[sample.label] == originals[key].wnid
        assert sample.extension == ("png" if sample.image.startswith(b"\x89PNG") else "jpg")
    for path in out.glob("*.tar"):
        with tarfile.open(path) as tar:
            assert {name.partition(".")[2] for name in tar.getnames()} == {"cls", "jpg"}
    manifest = open_source(str(out)).manifest
    assert manifest.dataset == "imagenet" and manifest.classes[0].startswith("n01440764 ")
    assert {split.name: (split.samples, len(split.shards)) for split in manifest.splits} == {
        "train": (31, 3),
        "val": (12, 1),
    }
    assert [origin.name for origin in manifest.sources] == [
        "ILSVRC2012_img_train.tar",
        "ILSVRC2012_img_val.tar",
    ]
    report = "".join(path.read_text() for path in out.glob("*report*"))
    lines = {line for line in report.splitlines() if "_2933" in line or "_90" in line}
    for name in ("n02105855_2933", "n01440764_900", "n01440764_901"):
        assert any(name in line for line in lines), report
    assert sum(json.loads((out / "dataset.json").read_text())["report"].values()) >= 3


def test_of_the_full_imagenet_nothing_may_be_missing_from_the_shards(
    small_imagenet, tmp_path, monkeypatch
):
    """The official counts are those of what was stored: one damaged image is one too many."""
    monkeypatch.setattr(imagenet, "OFFICIAL", {"train": 31, "val": 12})
    monkeypatch.setattr(imagenet, "OFFICIAL_CLASSES", 4)
    monkeypatch.setattr(imagenet, "OFFICIAL_PER_CLASS", {"train": range(7, 10), "val": range(3, 4)})
    source = small_imagenet.folders(tmp_path / "raw")
    (damaged, *_) = source.glob("train/*/*.JPEG")
    damaged.write_bytes(bytes(damaged.stat().st_size))
    packing = Packing(shards=2, workers=1)
    with pytest.raises(DataError, match="1 of 43 images cannot be used .* 0 may be missing"):
        Imagenet(source, tmp_path / "out", choice=ImagenetPart(), packing=packing).run()
    allowed = Packing(shards=2, workers=1, allow_left_out=1)
    Imagenet(source, tmp_path / "out", choice=ImagenetPart(), packing=allowed).run()
    assert len(contents(tmp_path / "out")) == 42
