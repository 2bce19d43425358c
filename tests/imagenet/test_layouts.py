"""ImageNet is read from all its published layouts, with the right labels."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rackrun.convert import imagenet
from rackrun.convert.imagenet import ImagenetPart, listing
from rackrun.errors import DataError
from tests.lab.data import SmallImageNet, tar
from tests.lab.run import write

PART = ImagenetPart(subset=True)

LAYOUTS: dict[str, Callable[[SmallImageNet, Path], Path]] = {
    "official archives": lambda small, root: small.archives(root / "raw", "gnu"),
    "official archives, packed by Python": lambda small, root: small.archives(root / "raw"),
    "class folders": lambda small, root: small.folders(root / "raw"),
    "flat validation and devkit": lambda small, root: small.folders(root / "raw", flat=True),
    "Kaggle's tree": lambda small, root: write(root / "raw", small.kaggle()),
    "Kaggle's zip": lambda small, root: small.kaggle_zip(root / "kaggle.zip"),
}


def converted(source: Path, choice: ImagenetPart = PART) -> dict[str, tuple[str, int, bytes]]:
    """Return key -> split, label and bytes of every image that the listing names."""
    data = listing(source, choice)
    return {
        record.key: (record.split, record.label, data.containers[record.container].read(record))
        for record in data.records
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_images_with_the_same_labels(layout, small_imagenet, tmp_path):
    """A label is the rank of the wnid, whatever the order of tars, folders or the devkit. Two
    classes are called crane: the words stand behind the wnid."""
    expected = {
        image.stem: (split, small_imagenet.wnids.index(image.wnid), image.data)
        for split, part in (("train", small_imagenet.train), ("val", small_imagenet.val))
        for image in part
    }
    source = LAYOUTS[layout](small_imagenet, tmp_path)
    assert converted(source) == expected
    classes = listing(source, PART).classes
    assert classes == named(small_imagenet)
    assert "n02012849 crane" in classes and "n03126707 crane" in classes


def named(small: SmallImageNet) -> tuple[str, ...]:
    return tuple(f"{wnid} {small.words(wnid)}" for wnid in small.wnids)


def test_tars_beside_sorted_class_folders_need_no_devkit(small_imagenet, tmp_path):
    """Archives that were unpacked and sorted may stay: the folders are what is read."""
    source = small_imagenet.folders(tmp_path)
    expected = converted(source)
    for name in ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"):
        (source / name).write_bytes(b"no longer needed")
        assert converted(source) == expected
        assert listing(source, PART).classes == named(small_imagenet)


def test_nothing_is_extracted(small_imagenet, tmp_path):
    """Reading the nested tars leaves no file behind."""
    source = small_imagenet.archives(tmp_path / "raw")
    before = sorted(tmp_path.rglob("*"))
    assert converted(source)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_part_is_converted_when_it_is_asked_for(small_imagenet, tmp_path):
    """--classes chooses; labels are ranks among the chosen classes."""
    source = small_imagenet.archives(tmp_path)
    two = converted(source, ImagenetPart(classes="n03126707,n02012849"))
    assert {key[:9]: label for key, (split, label, _) in two.items() if split == "train"} == {
        "n02012849": 0,
        "n03126707": 1,
    }
    assert len(two) == 14 + 6
    assert len(listing(source, ImagenetPart(classes="3")).classes) == 3
    (tmp_path / "two.txt").write_text("n03126707 crane\nn02012849\n")
    of_a_file = converted(source, ImagenetPart(classes=str(tmp_path / "two.txt")))
    assert {key[:9]: label for key, (split, label, _) in of_a_file.items() if split == "train"} == {
        "n03126707": 0,
        "n02012849": 1,
    }


def test_the_full_set_is_known_by_its_counts(small_imagenet, tmp_path, monkeypatch):
    """With the right counts in all, a class with an image too few still shows."""
    monkeypatch.setattr(imagenet, "OFFICIAL", {"train": 31, "val": 12})
    monkeypatch.setattr(imagenet, "OFFICIAL_CLASSES", 4)
    monkeypatch.setattr(imagenet, "OFFICIAL_PER_CLASS", {"train": range(7, 10), "val": range(3, 4)})
    source = small_imagenet.archives(tmp_path)
    assert len(converted(source, ImagenetPart())) == 43
    monkeypatch.setattr(imagenet, "OFFICIAL_PER_CLASS", {"train": range(7, 9), "val": range(3, 4)})
    with pytest.raises(DataError, match="--subset"):
        converted(source, ImagenetPart())


def test_a_tar_with_a_hostile_name_gives_no_way_out(small_imagenet, tmp_path):
    """A name with dots leads nowhere but into a key."""
    source = small_imagenet.archives(tmp_path)
    hostile = {"../../n01440764_1.JPEG": small_imagenet.train[0].data}
    (source / "ILSVRC2012_img_train.tar").write_bytes(tar({"n01440764.tar": tar(hostile)}))
    (source / "ILSVRC2012_img_val.tar").write_bytes(tar({}))
    assert list(converted(source)) == ["n01440764_1"]
