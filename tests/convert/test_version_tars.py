"""Folders of other programs' tars get versions: fewer samples, other classes."""

from pathlib import Path

import pytest

from rackrun.convert.__main__ import main
from rackrun.errors import DataError
from rackrun.shards.open import open_source
from tests.convert.conftest import labels, manifest_of, numbers, run
from tests.lab.data import (
    by_webdataset,
    drawn,
    everything,
    tars_in,
    write_tar,
)


def test_no_tar_of_another_program_is_changed(tmp_path):
    """A drop writes an index; the tars, also one that the index does not have, keep their bytes."""
    by_webdataset(tmp_path)
    main(["index", str(tmp_path)])
    write_tar(
        tmp_path / "imagenet-train-000002.tar", [("new.jpg", drawn("new")), ("new.cls", b"0")]
    )
    before, first = tars_in(tmp_path), numbers(tmp_path)
    run("drop", tmp_path, "train0_1")
    assert tars_in(tmp_path) == before
    assert numbers(tmp_path) == {key: label for key, label in first.items() if key != "train0_1"}
    assert numbers(f"{tmp_path}@1") == first


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
