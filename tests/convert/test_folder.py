"""Any folder of class folders becomes a data set, and what cannot be right is refused."""

import os
from pathlib import Path

import pytest

from shards.errors import DataError, Problem, UsageError
from shards.index import Card
from tests.convert.conftest import Convert, everything
from tests.convert.drawn import drawn, write_files


def card_of(folder: Path) -> Card:
    return Card.parse((folder / "dataset.json").read_bytes(), "")


def classes(count: int, *names: str) -> dict[str, bytes]:
    return {f"{name}/{n}.jpg": drawn(f"{name} {n}") for name in names for n in range(count)}


def test_class_folders_are_the_classes(tmp_path: Path, convert: Convert) -> None:
    """Labels are the sorted folder names, sub-folders belong to their class, keys are unique."""
    files = classes(4, "tulip", "aster") | {"aster/wild/x y.png": drawn("x", format="PNG")}
    out = convert("folder", write_files(tmp_path / "my flowers", files))
    card = card_of(out)
    assert card.dataset == "my_flowers" and card.classes == ("aster", "tulip")
    found = {sample.key: (sample.label, sample.image) for sample in everything(out)}
    assert len(found) == 9
    assert found["tulip_2"] == (1, files["tulip/2.jpg"])
    (wild,) = (key for key in found if key.startswith("aster_wild_x_y-"))
    assert found[wild] == (0, files["aster/wild/x y.png"])


def test_given_splits_are_kept(tmp_path: Path, convert: Convert) -> None:
    """With train/ and val/ above the classes nothing is drawn; loose files are named."""
    train = {f"train/{name}": data for name, data in classes(5, "a", "b").items()}
    val = {f"validation/{name}": data for name, data in classes(2, "a", "b").items()}
    val = {name.replace(".jpg", "v.jpg"): data for name, data in val.items()}
    loose = {"train/loose.jpg": drawn("loose"), "test/a/0.jpg": drawn("test")}
    out = convert("folder", write_files(tmp_path / "set", train | val | loose))
    card = card_of(out)
    assert [(split.name, split.samples) for split in card.splits] == [("train", 10), ("val", 4)]
    assert card.report["unlabelled"] == 2


def test_names_of_every_kind(tmp_path: Path, convert: Convert) -> None:
    """Spaces, dots, umlauts, bytes that are no text, one stem twice: all become safe keys."""
    folder = write_files(tmp_path / "set", classes(2, "Äpfel", "b.c"))
    for name in (b"a b.jpg", b"a.b.jpg", "ü.jpg".encode(), b"\xff\xfe.jpg", b"a.jpg", b"a.jpeg"):
        Path(os.fsdecode(os.fsencode(folder / "b.c") + b"/" + name)).write_bytes(drawn(name))
    out = convert("folder", folder)
    keys = [sample.key for sample in everything(out)]
    assert len(set(keys)) == len(keys) == 10
    assert all(key.isascii() and "." not in key and " " not in key for key in keys)
    assert card_of(out).classes == ("b.c", "Äpfel")


def test_the_key_of_a_picture_that_begins_with_its_class(tmp_path: Path, convert: Convert) -> None:
    """n01440764/n01440764_10026.JPEG keeps its own name, and what clashes its suffix."""
    files = {f"{wnid}/{wnid}_{n}.JPEG": drawn(n) for wnid in ("n01", "n01_1") for n in range(2)}
    out = convert("folder", write_files(tmp_path / "set", files | {"n01/1_0.jpg": drawn(9)}))
    assert sorted(sample.key for sample in everything(out)) == [
        *("n01_0", "n01_1", "n01_1_0", "n01_1_0_JPEG", "n01_1_1")
    ]


@pytest.mark.parametrize(
    ("files", "problem", "says"),
    [
        ({}, UsageError, "0 class folders"),
        (classes(2, "only"), UsageError, "1 class folders"),
        (classes(2, "a") | {"b/readme.txt": b"x"}, DataError, r"b: no pictures in this class"),
        (
            {f"train/{n}": d for n, d in classes(2, "a", "b").items()} | {"val/c/0.jpg": b"x"},
            DataError,
            "val/c: no class of train/",
        ),
    ],
)
def test_impossible_folders_are_refused(
    files: dict[str, bytes], problem: type[Problem], says: str, tmp_path: Path, convert: Convert
) -> None:
    """No classes, one class, an empty class, a class that only validation has."""
    (tmp_path / "set").mkdir()
    with pytest.raises(problem, match=says) as error:
        convert("folder", write_files(tmp_path / "set", files))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["file link", "folder link", "pipe"])
def test_links_and_devices_are_refused(kind: str, tmp_path: Path, convert: Convert) -> None:
    """DATA-2: a link could lead anywhere and a pipe never ends: both are named, with what to do."""
    folder = write_files(tmp_path / "set", classes(2, "a", "b"))
    if kind == "pipe":
        os.mkfifo(folder / "a" / "x.jpg")
    else:
        (folder / "a" / "x.jpg").symlink_to(folder / "b" / ("0.jpg" if kind[0] == "f" else "."))
    with pytest.raises(DataError, match=r"x.jpg: .*; copy the real files: cp -rL"):
        convert("folder", folder)


def test_a_class_of_which_nothing_is_whole(tmp_path: Path, convert: Convert) -> None:
    """A class whose pictures are all broken is an error, not a silent hole in the labels."""
    files = classes(3, "a") | {f"b/{n}.jpg": b"broken" for n in range(2)}
    with pytest.raises(DataError, match="class b: no picture of it is whole"):
        convert("folder", write_files(tmp_path / "set", files), "--val-percent", "0")


def test_a_picture_that_vanishes_is_named(tmp_path: Path, convert: Convert) -> None:
    """A file that is gone, or grew, when its turn comes is left out and in the report."""
    from convert.records import Defect, Folder

    folder = Folder(write_files(tmp_path / "set", classes(2, "a")))
    first, second = folder.records()
    (tmp_path / "set" / first.name).unlink()
    with (tmp_path / "set" / second.name).open("ab") as file:
        file.write(b"more")
    for record in (first, second):
        with pytest.raises(Defect) as defect:
            folder.read(record)
        assert defect.value.kind == "unreadable"


def test_shards_among_the_pictures_are_refused(tmp_path: Path, convert: Convert) -> None:
    """OUT inside SRC would become a class of its own at the next conversion."""
    folder = write_files(tmp_path / "set", classes(2, "a", "b"))
    with pytest.raises(UsageError, match="set/out: lies inside"):
        convert("folder", folder, out="set/out")
    assert not (folder / "out").exists()
