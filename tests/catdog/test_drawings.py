"""Archives of drawn images are reproducible and whole."""

import resource
from zipfile import ZipFile

import pytest

from rackrun.catdog.demo import write_archive
from rackrun.catdog.drawing import jpeg
from rackrun.errors import SaveError


def test_an_archive_has_the_layout_of_kaggle(tmp_path):
    """train/cat.0.jpg, train/dog.0.jpg and so on, as many of one kind as of the other."""
    write_archive(tmp_path / "train.zip", 20, seed=3)
    with ZipFile(tmp_path / "train.zip") as archive:
        names = set(archive.namelist())
        assert archive.testzip() is None
        assert archive.read("train/dog.4.jpg") == jpeg("dog", 3, 4)
    expected = {f"train/{kind}.{number}.jpg" for kind in ("cat", "dog") for number in range(10)}
    assert names == expected
    assert [path.name for path in tmp_path.iterdir()] == ["train.zip"]
    assert len({jpeg("dog", 3, 4), jpeg("cat", 3, 4), jpeg("dog", 2, 4), jpeg("dog", 3, 3)}) == 4


def test_a_full_disk_is_named(tmp_path):
    """An archive that does not fit is a SaveError that names it, and nothing is left of it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(SaveError, match=r"train\.zip: cannot be written"):
            write_archive(tmp_path / "train.zip", 40)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
