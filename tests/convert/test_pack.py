"""The same images and options give the same bytes, however they are converted."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from rackrun.convert.options import Packing
from rackrun.convert.packing.plan import make_plan
from rackrun.convert.readers.records import Record, RecordListing
from rackrun.errors import Problem
from tests.convert.conftest import shown
from tests.lab.data import every_sample, kaggle
from tests.lab.run import write


def test_tasks_that_end_together_complete_the_folder_once(train_zip, command, tmp_path):
    """Side by side, all end well, and one of them completes the folder."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert command("catdog", train_zip, whole).end()[0] == 0
    words = ("catdog", train_zip, out, "--task-count", 3, "--task-index")
    tasks = [command(*words, number) for number in range(3)]
    assert [task.end()[0] for task in tasks] == [0, 0, 0]
    assert shown(out) == shown(whole)


def test_a_tenth_of_each_class_is_held_out_whatever_the_size(train_zip, convert):
    """The validation part is stratified and fixed, also with other options."""
    outs = [convert("catdog", train_zip, *size, out=f"{len(size)}") for size in ((), ("--gray",))]
    held_out = [
        [sample for sample in every_sample(out)[-30:]]  # val comes after train
        for out in outs
    ]
    assert {sample.key for sample in held_out[0]} == {sample.key for sample in held_out[1]}
    assert [sum(sample.label == label for sample in held_out[0]) for label in (0, 1)] == [15, 15]
    numbers = [int(re.sub(r"\D", "", sample.key)) for sample in held_out[0]]  # 0 to 149
    assert min(numbers) < 50 and max(numbers) >= 100, "drawn, and not the first or last of a class"


def listing_of(images: list[tuple[str, int, int]]) -> RecordListing:
    records = (Record(key, label, "", f"{key}.jpg", 0, 0, 9, 9, crc) for key, label, crc in images)
    return RecordListing("set", ("a", "b", "c"), (Nothing(),), records)


class Nothing:
    """A container of which only the name matters."""

    name = "nothing"


@given(
    images=st.lists(
        st.tuples(
            st.from_regex(r"[a-z0-9_-]{1,12}", fullmatch=True),
            st.integers(0, 2),
            st.integers(0, 9) | st.integers(10, 2**32 - 1),
        )
    ),
    shards=st.integers(0, 9),
    percent=st.integers(0, 90),
)
def test_a_plan_holds_every_image_once(images, shards, percent):
    """Whatever is asked, each image is planned exactly once, or one line says why not.

    Copies are in one split, and of each class as many images are held out as their copies allow.
    """
    packing = Packing(shards=shards, val_percent=percent)
    try:
        plan = make_plan(listing_of(images), packing)
    except Problem as problem:
        assert re.search("no images|would both be called|too many|no class has two", str(problem))
        return
    planned = [*plan.table]
    expected = [(key, label) for key, label, _ in images]
    assert sorted((record.key, record.label) for record in planned) == sorted(expected)
    splits_of, labels_of = defaultdict(set), defaultdict(set)
    for record in planned:
        splits_of[record.crc].add(record.split)
        labels_of[record.crc].add(record.label)
    assert percent == 0 or all(len(splits) == 1 for splits in splits_of.values())
    for label in range(3):
        drawn = [each for each in planned if min(labels_of[each.crc]) == label]
        copies = Counter(record.crc for record in drawn)
        val = sum(record.split == "val" for record in drawn)
        total = sum(record.label == label for record in drawn)
        wanted = min(max(round(total * percent / 100), percent > 0), max(len(drawn) - 1, 0))
        assert (val > 0) == (percent > 0 and len(copies) > 1)
        if set(copies.values()) == {1}:
            assert val == wanted
        elif val:
            assert val <= max(wanted, min(copies.values()))
    for split in ("train", "val"):
        sizes = [shard.images for shard in plan.shards if shard.split == split]
        assert not sizes or max(sizes) - min(sizes) <= 1
        assert sum(sizes) == sum(record.split == split for record in planned)
    assert make_plan(listing_of(images[::-1]), packing).digest == plan.digest


def test_a_second_run_has_nothing_to_do(train_zip, convert, capsys):
    """The same command on a finished folder ends at once, leaves every file as it is, and says the
    command that trains."""
    out = convert("catdog", train_zip)
    message = f"to train on it, type: ./run-local catdog --data {shlex.quote(str(out))}\n"
    assert capsys.readouterr().err.endswith(message)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir() if path.suffix}
    convert("catdog", train_zip)
    assert capsys.readouterr().err.endswith(f"already has this data set\n{message}")
    assert before == {path.name: path.stat().st_mtime_ns for path in out.iterdir() if path.suffix}


def test_a_log_has_the_quality_report_before_the_command_that_trains(train_zip, tmp_path):
    """Also where both streams go to one file, as in a batch job."""
    words = [sys.executable, "-m", "rackrun", "convert", "catdog", str(train_zip), "out"]
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    with (tmp_path / "log").open("w") as log:
        subprocess.run(words, cwd=tmp_path, env=env, stdout=log, stderr=log, check=True)
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[-1].startswith("to train on it") and "stored" in lines[-2], lines


def test_force_removes_what_the_manifest_lists_and_nothing_else(train_zip, convert):
    """Foreign tars, reports and partial files in OUT stay, though named like ours."""
    mine = {
        "holiday-photos-202408.tar": b"precious",
        "catdog-train-000400.tar": b"precious",
        "holiday-photos.index.npy": b"precious",
        ".other.1234abcd.partial": b"half",
    }
    out = write(convert("catdog", train_zip, "--shards", 9), mine)
    (out / ".catdog-train-000000.tar.1234abcd.partial").write_bytes(b"ours, of a kill")
    convert("catdog", train_zip, "--shards", 3, "--force")
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.name in mine} == mine
    assert sorted(path.name for path in out.glob("catdog-train-*.tar")) == [
        *(f"catdog-train-{number:06d}.tar" for number in range(3)),
        "catdog-train-000400.tar",
    ]
    assert [path.name for path in out.glob(".*.partial")] == [".other.1234abcd.partial"]


def test_the_manifest_says_where_it_came_from(train_zip, convert):
    """Name, size and listing digest of the archive and the preset stand in the manifest."""
    out = convert("catdog", train_zip, "--short-side", 20)
    manifest = json.loads((out / "dataset.json").read_bytes())
    assert manifest["preset"]["short_side"] == 20
    (source,) = manifest["sources"]
    assert (source["name"], source["bytes"]) == ("train.zip", sum(map(len, kaggle(150).values())))
    assert re.fullmatch("[0-9a-f]{64}", source["listing_sha256"])
