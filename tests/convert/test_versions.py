"""A finished shard folder gets new versions, and no byte of its tars changes."""

import shutil
import zlib

import pytest

from rackrun.convert.__main__ import main
from rackrun.convert.packing.stored_samples import shards_of
from rackrun.errors import DataError, UsageError
from rackrun.shards.open import open_source
from rackrun.shards.source import Source
from tests.convert.conftest import (
    CLASSES,
    FEW,
    labels,
    manifest_of,
    photos,
    run,
    shown,
)
from tests.lab.data import drawn, write_zip
from tests.lab.run import write
from tests.lab.sources import flipped


def test_a_damaged_index_hides_no_damaged_shard(tmp_path, data, capsys):
    """A shard whose rows cannot be read is verified by its digest."""
    photos(tmp_path / "photos", range(24, 28))
    run("append", tmp_path / "photos", data, "--val-percent", 0)
    flipped(-3)(data / "photos-train.v2.index.npy")
    flipped(1600)(data / "photos-train-000000.tar")
    with pytest.raises(DataError, match="2 faults"):
        run("verify", data)
    printed = capsys.readouterr().out
    assert "photos-train.v2.index.npy: its SHA-256" in printed
    assert "photos-train-000000.tar: damaged: its SHA-256" in printed


def test_nothing_new_makes_no_version(tmp_path, data, capsys):
    """The same images again, under whatever names: counted, and no file is written."""
    before = shown(data)
    run("append", tmp_path / "photos", data)
    assert shown(data) == before
    assert "48 images: already there" in capsys.readouterr().err


def test_another_image_of_a_taken_name_gets_a_key_of_its_own(tmp_path, data):
    """Names are only names: cat/1.jpg of another camera is new; that of the same one is not.

    The key has the CRC-32 of the image.
    """
    other = write(tmp_path / "other", {"cat/1.jpg": drawn("x"), "cat/2.jpg": drawn("cat 2")})
    run("append", other, data, "--val-percent", 0)
    (key,) = labels(data).keys() - labels(f"{data}@1").keys()
    assert key == f"cat_1-{zlib.crc32(drawn('x')):08x}"
    run("append", other, data)
    assert manifest_of(data).number == 2


def test_dropped_images_do_not_come_back_by_an_append(tmp_path, data, capsys):
    """An append of the same folder leaves out what was dropped, unless --allow dropped."""
    run("drop", data, "cat_3")
    run("append", tmp_path / "photos", data)
    assert "1 image: dropped by" in capsys.readouterr().err
    assert "cat_3" not in labels(data)
    run("append", tmp_path / "photos", data, "--allow", "dropped", "--val-percent", 0)
    assert labels(data) == labels(f"{data}@1")


def keys_of_split(source: Source, split: str) -> set[str]:
    shards = [stored for stored in shards_of(source) if stored.split == split]
    return {key for stored in shards for key in stored.sample_keys()}


def test_rows_for_another_state_are_left_aside(tmp_path, data, capsys):
    """A row whose sample has another class by now changes nothing, and is named and counted."""
    path = tmp_path / "old.csv"
    elsewhere = min(keys_of_split(open_source(str(data)), "train") - {"cat_2", "cat_3"})
    rows = (
        f",cat_2,dog,drop\n,cat_3,,drop\n,cat_4,,relabel\nphotos-val-000000.tar,{elsewhere},,drop\n"
    )
    path.write_text(f"shard,key,class,action\n{rows}")
    run("drop", data, path)
    assert manifest_of(data).change == {"dropped": 1}
    said = capsys.readouterr().err
    message = "skipped 2 rows for another state of DATA; "
    assert f"{message}{path}: line 2: cat_2: its class is cat, not dog" in said
    assert "skipped 1 row whose action is not drop" in said


def test_a_table_of_new_images_is_appended(tmp_path, data):
    photos(tmp_path / "listed", range(30, 32))
    rows = "".join(f"{kind}/{n}.jpg,{kind}\n" for kind in CLASSES for n in (30, 31))
    (tmp_path / "list.csv").write_text(f"path,label\n{rows}")
    run("append", tmp_path / "list.csv", data, "--root", tmp_path / "listed")
    assert len(labels(data)) == 48 + 4


def test_own_splits_stay_apart(tmp_path, data):
    """Images of a zip go where its train/, val/ and test/ say; test is a new split."""
    parts = {"train": 100, "val": 200, "test": 300}
    files = {
        f"{part}/{kind}/{number}.jpg": drawn(f"{kind} {number}")
        for part, number in parts.items()
        for kind in CLASSES
    }
    run("append", write_zip(tmp_path / "split.zip", files), data)
    source = open_source(str(data))
    for part, number in parts.items():
        assert {f"{kind}_{number}" for kind in CLASSES} <= keys_of_split(source, part)


def test_a_mistyped_key_is_answered_with_a_real_one(data):
    """Keys come from file names, and zeros may be before their numbers."""
    with pytest.raises(
        DataError, match=r"^cat_01: no sample .* \(version 1\); keys look like (\w+)$"
    ) as refused:
        run("drop", data, "cat_01")
    assert str(refused.value).split()[-1] in labels(data)


def test_what_is_set_aside_for_tests_leaves_less_to_hold_out(tmp_path, data):
    """--test-percent 85 leaves 5 % to validate on, not the usual 10, and a tenth to train on."""
    run("append", photos(tmp_path / "new", range(100, 140)), data, "--test-percent", 85)
    before, after = (open_source(f"{data}@{number}") for number in (1, 2))
    added = {
        split: len(keys_of_split(after, split)) - len(keys_of_split(before, split))
        for split in ("train", "val")
    }
    assert added == {"train": 2 * 4, "val": 2 * 2}


def test_force_replaces_all_versions(tmp_path, data):
    """A conversion with --force leaves nothing of earlier versions, also of one that is damaged."""
    run("drop", data, "cat_1")
    (data / "dataset.v1.json").unlink()
    main(["folder", str(tmp_path / "photos"), str(data), *map(str, FEW), "--force"])
    assert manifest_of(data).number == 1
    main(["verify", str(data)])
    assert not list(data.glob("dataset.v*"))


def test_what_a_killed_command_has_left_is_removed_by_the_next(data):
    """Parts of an index or a manifest; another program's file stays."""
    ours, others = (data / f".{name}.0123abcd.partial" for name in ("photos-val.v2.index.npy", "x"))
    for path in (ours, others):
        path.write_bytes(b"half")
    run("drop", data, "cat_1")
    assert others.exists() and not ours.exists()


def test_an_append_that_was_stopped_goes_on_or_is_given_up(tmp_path, data):
    """Another append is refused or replaces it, and `verify` does not object to its shards."""
    shutil.copytree(tmp_path / "photos" / "cat", tmp_path / "leak" / "train" / "cat")
    write(tmp_path / "leak", {"val/cat/x.jpg": drawn("new"), "train/cat/y.jpg": drawn("new")})
    with pytest.raises(DataError, match="--allow leaks"):
        run("append", tmp_path / "leak", data)
    run("verify", data)
    other = photos(tmp_path / "other", range(50, 53))
    run("drop", data, "cat_1")  # meanwhile
    with pytest.raises(DataError, match="--allow leaks"):
        run("append", tmp_path / "leak", data)
    with pytest.raises(UsageError, match="holds an unfinished conversion"):
        run("append", other, data)
    run("append", other, data, "--force")
    assert manifest_of(data).change == {"added": 6}
    run("verify", data)
