"""A finished shard folder gets new versions, and no byte of its tars changes."""

import csv
import io
import shutil
import tarfile
import zlib
from pathlib import Path

import pytest

from rackrun.convert.__main__ import main
from rackrun.convert.packing.stored_samples import shards_of
from rackrun.errors import DataError, UsageError
from rackrun.shards.open import open_source
from rackrun.shards.samples import samples
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


def test_a_damaged_index_hides_no_damaged_shard_of_an_earlier_version(tmp_path, data, capsys):
    """Each shard is verified by any version whose index can be read, not by the newest alone."""
    photos(tmp_path / "photos", range(24, 28))
    run("append", tmp_path / "photos", data, "--val-percent", 0)
    for name, at in (("photos-train.v2.index.npy", -3), ("photos-train-000000.tar", 1600)):
        damaged = bytearray((data / name).read_bytes())
        damaged[at] ^= 1
        (data / name).write_bytes(damaged)
    with pytest.raises(DataError, match="3 faults"):
        run("verify", data)
    printed = capsys.readouterr().out
    assert "photos-train.v2.index.npy: its SHA-256" in printed
    assert "photos-train-000000.tar: the image at byte 1536 is damaged" in printed
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


def test_the_same_edit_again_changes_nothing(data):
    """A drop or relabel that was done is not done twice: it says so and ends well."""
    for command in (("drop", data, "cat_3"), ("relabel", data, "cat_4=dog")):
        run(*command)
        before = shown(data)
        run(*command)
        assert shown(data) == before


def table(path: Path, *rows: dict[str, str]) -> Path:
    """Write a table as doctor writes it."""
    columns = [
        "split",
        "shard",
        "key",
        "class",
        "problem",
        "action",
        "new_class",
        "score",
        "reason",
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_table_is_the_input_of_drop_and_of_relabel(tmp_path, data, capsys):
    """Each takes the rows of its action; rows without one are skipped and counted."""
    doctor = table(
        tmp_path / "doctor.csv",
        {"key": "cat_1", "class": "cat", "action": "drop"},
        {"key": "cat_2", "class": "cat", "action": "relabel", "new_class": "dog"},
        {"key": "cat_3", "class": "cat"},
    )
    run("drop", data, doctor)
    assert "skipped 2 rows whose action is not drop" in capsys.readouterr().err
    run("relabel", data, doctor)
    changed = labels(f"{data}@1") | {"cat_2": "dog"}
    del changed["cat_1"]
    assert labels(data) == changed


def test_rows_for_another_state_are_left_aside(tmp_path, data, capsys):
    """A row whose sample has another class by now changes nothing, and is named and counted."""
    row = {"key": "cat_2", "action": "drop"}
    path = table(tmp_path / "old.csv", row | {"class": "dog"}, row | {"key": "cat_3"})
    run("drop", data, path)
    assert manifest_of(data).change == {"dropped": 1}
    message = "skipped 1 row for another state of DATA; "
    assert f"{message}{path}: line 2: cat_2: its class is cat, not dog" in capsys.readouterr().err


def keys_of_split(source: Source, split: str) -> set[str]:
    shards = [stored for stored in shards_of(source) if stored.split == split]
    return {key for stored in shards for key in stored.sample_keys()}


def test_tables_and_archives_are_sources_too(tmp_path, data):
    """A CSV of paths, and a zip and a tar of class folders with a folder around them."""
    photos(tmp_path / "listed", range(30, 32))
    rows = "".join(f"{kind}/{n}.jpg,{kind}\n" for kind in CLASSES for n in (30, 31))
    (tmp_path / "list.csv").write_text("path,label\n" + rows)
    run("append", tmp_path / "list.csv", data, "--root", tmp_path / "listed")
    files = {f"new/{kind}/40.jpg": drawn(f"{kind} 40") for kind in CLASSES}
    run("append", write_zip(tmp_path / "new.zip", files), data)
    with tarfile.open(tmp_path / "new.tar", "w") as archive:
        for kind in CLASSES:
            member = tarfile.TarInfo(f"new/{kind}/50.jpg")
            image = drawn(f"{kind} 50")
            member.size = len(image)
            archive.addfile(member, io.BytesIO(image))
    run("append", tmp_path / "new.tar", data)
    assert manifest_of(data).number == 4
    assert len(labels(data)) == 48 + 4 + 2 + 2


def test_own_splits_stay_apart(tmp_path, data):
    """Images from train/, val/ and test/ go where their folders say; test is a new split."""
    parts = {"train": 100, "val": 200, "test": 300}
    files = {
        f"{part}/{kind}/{number}.jpg": drawn(f"{kind} {number}")
        for part, number in parts.items()
        for kind in CLASSES
    }
    run("append", write(tmp_path / "split", files), data)
    source = open_source(str(data))
    for part, number in parts.items():
        assert {f"{kind}_{number}" for kind in CLASSES} <= keys_of_split(source, part)


def test_what_is_set_aside_for_tests_leaves_less_to_hold_out(tmp_path, data):
    """--test-percent 85 leaves 5 % to validate on, not the usual 10, and a tenth to train on."""
    run("append", photos(tmp_path / "new", range(100, 140)), data, "--test-percent", 85)
    before, after = (open_source(f"{data}@{number}") for number in (1, 2))
    added = {
        split: len(keys_of_split(after, split)) - len(keys_of_split(before, split))
        for split in ("train", "val")
    }
    assert added == {"train": 2 * 4, "val": 2 * 2}


def shard_of(location: Path, key: str) -> str:
    source = open_source(str(location))
    for split in source.manifest.splits:
        for number, shard in enumerate(split.shards):
            if key in (sample.key for sample in samples(source, split.name, number)):
                return shard.name
    raise AssertionError(key)


def test_a_sample_is_named_with_its_shard(data, capsys):
    """SHARD.tar/KEY is the sample of that shard; one that lies elsewhere is skipped."""
    before, other = labels(data), shard_of(data, "cat_1")
    run("relabel", data, f"{other}/cat_1=dog")
    assert labels(data) == {**before, "cat_1": "dog"}
    run("drop", data, f"{shard_of(data, 'cat_1')}/cat_1")
    left = {key: label for key, label in before.items() if key != "cat_1"}
    assert labels(data) == left
    key = next(key for key in left if shard_of(data, key) != shard_of(data, "cat_2"))
    run("drop", data, f"{shard_of(data, 'cat_2')}/{key}")
    assert "skipped 1 row for another state of DATA" in capsys.readouterr().err
    assert labels(data) == left


def test_tasks_of_an_array_job_make_a_plain_folder_like_one_process(data, tmp_path):
    """What earlier conversions did with the images is described in both."""
    run("drop", data, "cat_1")
    run("shards", data, tmp_path / "plain")
    for task in (0, 1):
        run("shards", data, tmp_path / "tasks", "--task-count", 2, "--task-index", task)
    assert shown(tmp_path / "tasks") == shown(tmp_path / "plain")
    assert manifest_of(tmp_path / "plain").upright


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


def test_an_append_that_was_killed_after_its_version_is_no_obstacle(tmp_path, data, monkeypatch):
    """What it left goes with the next append, whatever that adds."""
    with monkeypatch.context() as patch:
        patch.setattr("rackrun.convert.packing.output_folder.shutil.rmtree", lambda *_, **__: None)
        run("append", photos(tmp_path / "more", range(30, 33)), data)
    assert (data / ".converting" / "plan").exists()
    run("append", photos(tmp_path / "others", range(40, 43)), data)
    assert manifest_of(data).number == 3 and not (data / ".converting").exists()


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
