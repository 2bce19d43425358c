"""Cats and dogs are read from every archive in which they are distributed."""

from pathlib import Path

import pytest

from tests.lab.data import drawn, every_sample, kaggle, write_zip
from tests.lab.run import write

SMALL = kaggle(6)


def images(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {sample.key: (sample.label, sample.image) for sample in every_sample(folder)}


@pytest.mark.parametrize("layout", ["zip", "deflated", "nested", "nested deflated", "folder"])
def test_kaggle_images_come_out_byte_for_byte(layout, tmp_path, convert):
    """The zip, the competition's zip around it, stored or deflated, a folder: the same samples."""
    source = write_zip(tmp_path / "train.zip", SMALL, deflated=layout == "deflated")
    if layout.startswith("nested"):
        around = {"sampleSubmission.csv": b"id,label", "train.zip": source.read_bytes()}
        source = write_zip(tmp_path / "dogs-vs-cats.zip", around, layout.endswith("deflated"))
    elif layout == "folder":
        source = write(tmp_path / "images", SMALL)
    expected = {
        f"{kind}_{number:05d}": (label, SMALL[f"train/{kind}.{number}.jpg"])
        for label, kind in enumerate(("cat", "dog"))
        for number in range(6)
    }
    assert images(convert("catdog", source)) == expected


def test_a_folder_may_hold_the_archive(tmp_path, convert):
    """Unpacking the competition's zip leaves a folder with train.zip in it: that will do."""
    folder = write(tmp_path / "dogs-vs-cats", {"sampleSubmission.csv": b"id,label"})
    write_zip(folder / "train.zip", SMALL)
    assert len(every_sample(convert("catdog", folder))) == 12


def test_microsofts_zip(tmp_path, convert):
    """PetImages: labels by folder; the readme and Thumbs.db are named, the empty file is too."""
    files = {
        f"PetImages/{kind}/{number}.jpg": drawn(f"{kind} {number}")
        for kind in ("Cat", "Dog")
        for number in range(3)
    }
    litter = {
        "readme[1].txt": b"hello",
        "PetImages/Cat/Thumbs.db": b"x",
        "__MACOSX/PetImages/Cat/._0.jpg": b"x",
        "PetImages/Cat/666.jpg": b"",
    }
    source = write_zip(tmp_path / "kagglecatsanddogs_5340.zip", files | litter, deflated=True)
    out = convert("catdog", source)
    assert sorted(images(out)) == [
        f"{kind}_{number:05d}" for kind in ("cat", "dog") for number in range(3)
    ]
    report = (out / "report.json").read_text()
    assert all(name in report for name in litter)
