"""Exact copies are named by what they do to a measurement, and a leak is refused."""

import json
import zlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rackrun.convert.__main__ import main
from rackrun.convert.packing.copies import SplitRows, copies
from rackrun.errors import DataError
from rackrun.shards.index import Shard
from rackrun.shards.writer import BLOCK
from tests.convert.conftest import manifest_of
from tests.lab.data import drawn, write_tar
from tests.lab.run import write


def pictures(*names: str) -> dict[str, bytes]:
    return {name: drawn(name) for name in names}


def with_copies() -> dict[str, bytes]:
    """Return a set with a copy in its class, one in another class, and one in val."""
    files = pictures(*(f"train/{kind}/{n}.jpg" for kind in ("oak", "pine") for n in range(4)))
    files |= pictures("val/oak/v.jpg", "val/pine/v.jpg")
    files["train/oak/again.jpg"] = files["train/oak/0.jpg"]
    files["train/pine/oak.jpg"] = files["train/oak/1.jpg"]
    files["val/pine/leak.jpg"] = files["train/pine/2.jpg"]
    return files


NAMES = {
    "copy": ("train/oak/0.jpg", "train/oak/again.jpg"),
    "two classes": ("train/oak/1.jpg", "train/pine/oak.jpg"),
    "leak": ("train/pine/2.jpg", "val/pine/leak.jpg"),
}


def reported(folder: Path) -> dict[str, set[str]]:
    """Return both names of each copy in report.json, by kind."""
    lines = json.loads((folder / "report.json").read_text())["findings"]
    return {
        line["found"]: {line["file"], line["detail"].partition(" in ")[0]}
        for line in lines
        if line["done"] == "kept"
    }


def test_a_leak_is_refused_until_it_is_allowed_by_name(tmp_path, convert, capsys):
    """The message has both names and the option; what is converted stays; all are named."""
    source = write(tmp_path / "set", with_copies())
    with pytest.raises(
        DataError, match="1 image also in another split.*: val/pine/leak.jpg = "
    ) as refused:
        convert("folder", source)
    assert "train/pine/2.jpg in train" in str(refused.value)
    assert "--allow leaks" in str(refused.value) and "--force" in str(refused.value)
    assert not (tmp_path / "out" / "dataset.json").exists()
    assert reported(tmp_path / "out") == {kind: set(names) for kind, names in NAMES.items()}
    capsys.readouterr()
    out = convert("folder", source, "--allow", "leaks")
    printed = capsys.readouterr()
    assert "shards are already there" in printed.err
    assert "kept: 1 identical to an image in another split: val/pine/leak.jpg (" in printed.out
    report = manifest_of(out).report
    assert report == {"copy": 1, "leak": 1, "two classes": 1}
    main(["summary", str(out)])
    assert "kept: 1 identical to an image in another class" in capsys.readouterr().out


def test_copies_in_a_published_set_are_named_only(tmp_path, convert):
    """Nobody can mend it, and its accuracy is compared with others' as it is."""
    files = {f"{kind}.{n}.jpg": drawn(kind) for kind in ("cat", "dog") for n in range(9)}
    out = convert("catdog", write(tmp_path / "set", files))
    assert manifest_of(out).report == {"copy": 14, "leak": 2}


def test_copies_in_tars_of_others(tmp_path, capsys):
    """`convert index` refuses the leak and leaves no index; --allow takes it; `verify` names it."""
    image = drawn("same")
    for split in ("train", "val"):
        members = [("own.jpg", drawn(split)), ("own.cls", b"0"), ("s.jpg", image), ("s.cls", b"1")]
        write_tar(tmp_path / "tars" / f"set-{split}-0.tar", members)
    args = ["index", str(tmp_path / "tars"), "--out", str(tmp_path / "out"), "--workers", "1"]
    with pytest.raises(DataError, match=r"set-val-000000.tar/s = set-train-000000.tar/s in train"):
        main(args)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.json"]
    main([*args, "--force", "--allow", "leaks"])
    main(["verify", str(tmp_path / "out"), "--workers", "1"])
    assert capsys.readouterr().out.count("1 identical to an image in another split: set-val-") == 2
    main(["verify", str(tmp_path / "out"), "--workers", "1", "--json"])
    assert "in another split" in json.loads(capsys.readouterr().out)["copies"][0]


def findings(
    images: list[tuple[str, str, int, bytes]],
    old: int = 0,
    crc: Callable[[bytes], int] = zlib.crc32,
) -> list[tuple[str, str, str]]:
    """Return what is found among images, (split, key, label, bytes), of a shard each."""
    shards: dict[str, list[Shard]] = defaultdict(list)
    rows: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    stored = {}
    for split, key, label, data in images:
        shard = Shard(f"{split}-{len(shards[split])}.tar", 1, 1024, "0" * 64)
        stored[shard.name] = f"{key}.seg.jpg".encode().ljust(BLOCK, b"\0") + data
        rows[split].append((len(shards[split]), BLOCK, len(data), crc(data), label))
        shards[split].append(shard)
    fields = [("shard", "u4"), ("image_offset", "u8"), ("image_length", "u4"), ("crc", "u4")]
    splits = [
        SplitRows(split, shards[split], np.array(of, [*fields, ("label", "i4")]))
        for split, of in rows.items()
    ]
    findings = copies(
        splits,
        ("rose", "tulip"),
        lambda shard, offset, length: stored[shard.name][offset : offset + length],
        lambda shard, key: f"{shard.name.partition('-')[0]}:{shard.name}:{key}",
        [SplitRows("train", shards["train"][:old], splits[0].rows)],
    )
    return [(each.name, each.kind, each.detail) for each in findings]


def test_a_collision_of_checksums_accuses_nobody():
    """Different bytes of one length and CRC-32 are no copies; equal bytes are."""
    images = {"a": b"abcdefgh", "b": b"zyxwvuts", "c": b"abcdefgh"}
    listed = [("train", key, 0, data) for key, data in images.items()]
    assert findings(listed, crc=lambda data: 7) == [
        ("train:train-2.tar:c", "copy", "train:train-0.tar:a")
    ]


def test_the_original_of_a_copy_is_in_train():
    """Whatever its name is; elsewhere the first of the split, which keeps its order."""
    same, pair = b"same bytes", b"a pair"
    assert findings(
        [
            ("test", "a/b", 0, same),
            ("val", "z", 1, pair),
            ("train", "z", 1, same),
            ("val", "a", 0, pair),
            ("train", "y", 0, b"another one"),
        ]
    ) == [
        ("test:test-0.tar:a/b", "leak", "train:train-0.tar:z in train"),
        ("val:val-1.tar:a", "two classes", "val:val-0.tar:z in class tulip"),
    ]


def test_of_an_append_only_pairs_with_a_new_image_are_found():
    """One of the two is enough, and an old pair does not hide the new one behind it."""
    same = b"same bytes"
    images = [("train", "a", 0, same), ("train", "b", 0, same), ("train", "c", 0, same)]
    assert [name for name, _, _ in findings(images)] == [
        "train:train-1.tar:b",
        "train:train-2.tar:c",
    ]
    assert findings(images, 2) == [("train:train-2.tar:c", "copy", "train:train-0.tar:a")]
    assert findings(images, 3) == []
