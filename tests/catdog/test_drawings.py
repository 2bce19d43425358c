"""Archives of drawn images are reproducible and whole."""

from zipfile import ZipFile

from rackrun.catdog.demo import write_archive
from rackrun.catdog.drawing import jpeg


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
