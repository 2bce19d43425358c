"""Folders of other programs' tars get versions: more tars, fewer samples, other classes."""

from pathlib import Path

import pytest
import webdataset

from rackrun.convert.__main__ import main
from rackrun.errors import DataError
from rackrun.shards.open import open_source
from tests.convert.conftest import labels, manifest_of, numbers, run
from tests.lab.data import (
    by_name,
    by_webdataset,
    drawn,
    everything,
    tars_in,
    write_tar,
)


def more(folder: Path, number: int, split: str = "train", **labels: int) -> Path:
    """Write one more tar as webdataset does, with these keys."""
    folder.mkdir(exist_ok=True)
    path = folder / f"imagenet-{split}-{number:06d}.tar"
    with path.open("wb") as file, webdataset.TarWriter(file) as sink:
        for key, label in labels.items():
            sink.write({"__key__": key, "jpg": drawn(key), "cls": label})
    return path


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Return a folder of tars that has been indexed."""
    folder = tmp_path / "tars"
    folder.mkdir()
    by_webdataset(folder)
    main(["index", str(folder)])
    return folder


def test_tars_that_come_into_the_folder_are_its_next_version(tars, capsys):
    """The folder is appended to itself: only what no version lists is read, no tar changes."""
    more(tars, 2, new0=0, new1=4)
    before, first = tars_in(tars), numbers(tars)
    run("append", tars, tars)
    assert tars_in(tars) == before
    newest = manifest_of(tars)
    assert (newest.number, newest.change) == (2, {"adopted": 2})
    assert newest.classes == ("0", "1", "2", "3", "4")
    assert numbers(tars) == first | {"new0": 0, "new1": 4}
    assert numbers(f"{tars}@1") == first
    run("verify", tars)
    run("append", tars, tars)
    assert manifest_of(tars).number == 2
    assert "4 tars: already in a version" in capsys.readouterr().err


def test_tars_that_lie_elsewhere_get_links(tmp_path, tars):
    """Links take the next numbers; the same tars again are known."""
    run("drop", tars, "train0_1")
    dropped = numbers(tars)
    elsewhere = more(tmp_path / "new", 0, far0=1, far1=2).parent
    more(elsewhere, 1, "val", far2=2)
    before = tars_in(elsewhere)
    run("append", elsewhere, tars)
    assert tars_in(elsewhere) == before
    assert numbers(tars) == dropped | {"far0": 1, "far1": 2, "far2": 2}
    links = {path.name: path.resolve().name for path in tars.iterdir() if path.is_symlink()}
    assert links == {
        "imagenet-train-000002.tar": "imagenet-train-000000.tar",
        "imagenet-val-000001.tar": "imagenet-val-000001.tar",
    }
    run("append", elsewhere, tars)
    assert manifest_of(tars).number == 3
    run("drop", tars, "far0")
    assert tars_in(elsewhere) == before
    run("verify", tars)


def test_no_tar_of_another_program_is_written_over(tars):
    """A tar that came into the folder, and nobody has appended yet, keeps its name and bytes."""
    tar = more(tars, 2, new0=0)
    before = tar.read_bytes()
    run("drop", tars, "train0_1")
    assert tar.read_bytes() == before
    run("append", tars, tars)
    assert "new0" in numbers(tars) and "train0_1" not in numbers(tars)


def test_numbers_of_classes_come_to_names_that_are_there(tmp_path):
    """A number for which there is a name is that class; others are refused."""
    tar = more(tmp_path / "new", 0, x=0)
    by_name(tmp_path / "names")
    main(["index", str(tmp_path / "names"), "--out", str(tmp_path / "named")])
    with pytest.raises(DataError, match="class 2, and there are 2 names"):
        run("append", more(tmp_path / "new", 1, y=2), tmp_path / "named")
    run("append", tar, tmp_path / "named")
    assert labels(tmp_path / "named")["x"] == "oak tree"


def test_two_splits_may_share_a_key(tmp_path):
    """Other programs number each split from 0: then the shard is a part of a sample's name."""
    for split in ("train", "val"):
        members = []
        for n in range(3):
            members += [(f"{n}.cls", b"%d" % (n % 2)), (f"{n}.jpg", drawn(f"{split}{n}"))]
        write_tar(tmp_path / "tars" / f"{split}-0.tar", members)
    data = tmp_path / "tars"
    main(["index", str(data)])
    with pytest.raises(DataError, match=r"two samples have that key; type one of train-0\.tar/1 "):
        run("drop", data, "1")
    run("drop", data, "val-0.tar/1")
    run("relabel", data, "train-0.tar/2=1")
    assert stored_in(data, "train") == [("0", "0"), ("1", "1"), ("2", "1")]
    assert stored_in(data, "val") == [("0", "0"), ("2", "0")]
    run("shards", data, tmp_path / "plain")
    assert len(labels(tmp_path / "plain")) == 5  # under keys of which none comes twice


def stored_in(folder: Path, split: str) -> list[tuple[str, str]]:
    """Return key and class of each sample of a split."""
    classes = manifest_of(folder).classes
    samples = everything(open_source(str(folder)), split)
    return sorted((sample.key, classes[sample.label]) for sample in samples)
