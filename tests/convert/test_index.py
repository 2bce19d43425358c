"""Tars of other programs get an index and a manifest, keep every byte, and train exactly."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from webdataset.tariterators import group_by_keys, tar_file_iterator

from rackrun.convert.__main__ import main
from rackrun.nginx.serve import serving, start
from rackrun.nginx.site import FolderError, Site
from tests.convert.conftest import manifest_of
from tests.lab.data import (
    as_hugging_face,
    by_name,
    by_webdataset,
    drawn,
    every_sample,
    tars_in,
    write_tar,
)
from tests.lab.servers import open_folder


@pytest.mark.parametrize("layout", [by_webdataset, as_hugging_face], ids=lambda each: each.__name__)
def test_tars_are_indexed_where_they_lie(tmp_path, layout, capsys):
    """Every image with its label, in order; no byte of the tars is changed; `verify` is content."""
    labels = layout(tmp_path)
    before = tars_in(tmp_path)
    main(["index", str(tmp_path), "--workers", "1"])
    assert tars_in(tmp_path) == before
    manifest = manifest_of(tmp_path)
    assert [split.name for split in manifest.splits] == ["train", "val"]
    samples = every_sample(tmp_path)
    assert [sample.label for sample in samples] == list(labels.values())
    for sample, key in zip(samples, labels, strict=True):
        assert sample.image == drawn(
            key, format={"jpg": "JPEG"}.get(sample.extension, sample.extension.upper())
        )
    main(["verify", str(tmp_path), "--workers", "1"])
    printed = capsys.readouterr()
    assert "all correct" in printed.out
    assert re.search(rf"type: ./run-local \w+ --data {tmp_path}\n", printed.err)


@pytest.mark.parametrize("other", ["depth.jpg", "meta.json", "seg.png", "0.cls", "b.txt"])
def test_a_key_ends_at_the_first_dot(tmp_path, other):
    """As in webdataset: {jpg, cls, depth.jpg} is one sample, whatever the order of its members."""
    members = []
    for number, key in enumerate(("a", "dir.v2/b")):
        parts = {"jpg": drawn(key), "cls": b"%d" % number, other: drawn("other")}
        names = sorted(parts, reverse=bool(number))
        members += [(f"{key}.{name}", parts[name]) for name in names]
    tar = write_tar(tmp_path / "set-train-0.tar", members)
    main(["index", str(tmp_path), "--workers", "1"])
    expected = [("a", 0, drawn("a")), ("dir.v2/b", 1, drawn("dir.v2/b"))]
    samples = every_sample(tmp_path)
    assert [(sample.key, sample.label, sample.image) for sample in samples] == expected
    with tar.open("rb") as file:
        members_read = ({**member, "__url__": ""} for member in tar_file_iterator(file))
        theirs = list(group_by_keys(members_read))
    assert [(each["__key__"], int(each["cls"]), each["jpg"]) for each in theirs] == expected


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_cls_wins_over_json_and_json_over_txt(tmp_path, order):
    """A caption in .txt never becomes the class of a sample that has one in another member."""
    labels = [("cls", b"2"), ("json", b'{"label": 1}'), ("txt", b"0")]
    for most in range(3):
        members = [("a.jpg", drawn("a"))]
        members += [(f"a.{labels[n][0]}", labels[n][1]) for n in order if n >= most]
        write_tar(tmp_path / "set-train-0.tar", members)
        main(["index", str(tmp_path), "--workers", "1", "--force"])
        assert [sample.label for sample in every_sample(tmp_path)] == [2 - most]


def test_tars_in_folders_that_are_only_read(tmp_path):
    """With --out index and manifest lie apart, with links to the tars; classes are names."""
    labels = by_name(tmp_path / "tars")
    main(["index", str(tmp_path / "tars"), "--out", str(tmp_path / "out"), "--name", "trees"])
    manifest = manifest_of(tmp_path / "out")
    assert manifest.classes == ("oak tree", "pine")
    assert [split.name for split in manifest.splits] == ["test", "train"]
    assert (tmp_path / "out" / "trees-test-000000.tar").is_symlink()
    expected = {drawn(key): label for key, label in labels.items()}
    assert {sample.image: sample.label for sample in every_sample(tmp_path / "out")} == expected
    assert sorted(path.name for path in (tmp_path / "tars").rglob("*")) == [
        *("00000.tar", "00000.tar", "test", "train")
    ]


@pytest.fixture
def served() -> Iterator[Path]:
    """Yield a folder that nginx may read."""
    with open_folder() as top:
        (top / "tars").mkdir()
        yield top / "tars"


def test_indexed_tars_can_be_served_under_their_own_names(served, tmp_path):
    """A reader on another host verifies every byte; links to tars elsewhere are not followed."""
    as_hugging_face(served)
    main(["index", str(served), "--workers", "1"])
    with serving(Site(served, port=0, native=True)) as server:
        main(["verify", server.url, "--workers", "1"])
    main(["index", str(served), "--out", str(tmp_path / "out"), "--workers", "1"])
    with pytest.raises(FolderError, match="0.tar: a link, and links are not followed; index the"):
        start(Site(tmp_path / "out", port=0, native=True))


def train_tars(folder: Path, labels: list[tuple[int, int]]) -> Path:
    """Write a tar named for training per pair of labels, of two samples each."""
    for number, pair in enumerate(labels):
        members = []
        for n, label in enumerate(pair):
            key = f"{number}_{n}"
            members += [(f"{key}.jpg", drawn(key)), (f"{key}.cls", b"%d" % label)]
        write_tar(folder / f"set-train-{number:02d}.tar", members)
    return folder


def test_val_percent_holds_out_whole_tars(tmp_path, capsys):
    """The same tars every time, by their names alone, and no byte of them is changed."""
    folders = [train_tars(tmp_path / name, [(0, 1)] * 10) for name in ("a", "b")]
    before = tars_in(tmp_path)
    for folder in folders:
        main(["index", str(folder), "--val-percent", "15", "--workers", "1"])
    assert tars_in(tmp_path) == before
    assert "2 of 10 tars with 4 of 20 images are held out as val" in capsys.readouterr().err
    first, second = (manifest_of(each) for each in folders)
    assert [(split.name, split.samples) for split in first.splits] == [("train", 16), ("val", 4)]
    assert first.splits == second.splits
    main(["verify", str(folders[0]), "--workers", "1"])


IMAGE = drawn("x")
GOOD = [("a.jpg", IMAGE), ("a.cls", b"0")]


def test_what_is_left_out_is_counted_by_what_it_lacks(tmp_path):
    """Two samples without a class and one without an image are not the same mistake."""
    left_out = [("b.jpg", IMAGE), ("c.jpg", IMAGE), ("d.cls", b"0")]
    write_tar(tmp_path / "set-train-0.tar", [*GOOD, *left_out])
    main(["index", str(tmp_path), "--workers", "1", "--allow-left-out", "3"])
    manifest = manifest_of(tmp_path)
    assert manifest.report == {"no image": 1, "unlabeled": 2}
