"""A folder of images as --data: converted once, and used again while it stays as it is."""

import shutil

import pytest

from tests.lab.data import drawn
from tests.lab.run import run

TRAIN = "catdog --data pictures --recipe demo --epochs 1 --device cpu"


@pytest.fixture
def folder(tmp_path):
    """Return a folder with one of images, by class, in which commands are typed."""
    for kind in ("cat", "dog"):
        (tmp_path / "pictures" / kind).mkdir(parents=True)
        for number in range(12):
            path = tmp_path / "pictures" / kind / f"{number}.jpg"
            path.write_bytes(drawn(kind, (64 + number, 48)))
    return tmp_path


def shards(folder):
    return sorted((folder / "home" / ".cache" / "rackrun" / "data").glob("*"))


def test_a_folder_of_images_is_converted_once(folder):
    """The first launch says where to, the next that it is there, for a changed folder anew."""
    before = run(f"./run-local --dry-run {TRAIN}", folder)
    assert before.code == 0, before.said
    assert "pictures: images, converted once, to " in before.err
    assert not shards(folder), "a dry run only says so"
    first = run(f"./run-local --plain {TRAIN}", folder)
    assert first.code == 0, first.said
    (made,) = shards(folder)
    assert str(made) in first.err
    assert "in 2 classes" in first.said
    again = run(f"./run-local --dry-run {TRAIN}", folder)
    assert f"pictures: images, converted before, to {made}" in again.err
    shutil.copy(folder / "pictures" / "cat" / "1.jpg", folder / "pictures" / "cat" / "new.jpg")
    changed = run(f"./run-local --dry-run {TRAIN}", folder)
    assert "pictures: images, converted once, to " in changed.err
    assert f"earlier states of pictures, to be removed once no run needs them: {made} (" in (
        changed.err
    )


def test_a_folder_that_cannot_be_converted_ends_the_launch_as_convert_ends(folder):
    """The code and the line are those of the conversion, and there is no run folder."""
    for path in (folder / "pictures").glob("*/*"):
        path.write_text(f"no image, but {path}")
    alone = run("rackrun convert folder pictures out", folder)
    launch = run(f"./run-local --plain {TRAIN}", folder)
    assert launch.code == alone.code != 0
    assert "no image in it is whole" in alone.err
    assert "no image in it is whole" in launch.err
    assert "convert folder pictures SHARDS; then train with --data SHARDS" in launch.err
    assert not (folder / "runs").exists()
