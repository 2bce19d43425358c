"""Images that are in a source more than once, as crawlers leave them, do not stop a conversion."""

import json
from collections import Counter, defaultdict
from hashlib import sha256

import pytest

import rackrun
from tests.lab.data import drawn, everything, tar, write_zip
from tests.lab.run import run, write

KINDS = ("cat", "dog", "fox")
WORKERS = "--workers 1"


def crawled():
    """Return 120 images: some twice in their class, one in two classes, a placeholder in all."""
    files = {f"set/{kind}/{n}.jpg": drawn(f"{kind}{n}") for kind in KINDS for n in range(25)}
    for n in range(20):
        files[f"set/cat/{n} copy.jpg"] = files[f"set/cat/{n}.jpg"]
    for kind in KINDS:
        files |= {f"set/{kind}/gone{n}.jpg": drawn("not available") for n in range(8)}
    files["set/fox/dog.jpg"] = files["set/dog/3.jpg"]
    # As long as each other, and the same at their ends.
    scan = bytearray(drawn("scan", (120, 120), format="BMP"))
    for n in range(1, 3):
        scan[60] ^= n
        files[f"set/fox/scan{n}.bmp"] = bytes(scan)
    return files


def splits_of(folder):
    """Return by split the class and the digest of each image by its key."""
    source = rackrun.open_source(str(folder))
    return {
        split.name: {
            sample.key: (source.manifest.classes[sample.label], sha256(sample.image).hexdigest())
            for sample in everything(source, split.name)
        }
        for split in source.manifest.splits
    }


def split_of_images(folder):
    """Return the splits that each image is in, by its digest."""
    splits = defaultdict(set)
    for split, images in splits_of(folder).items():
        for _, digest in images.values():
            splits[digest].add(split)
    return splits


def made(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def test_copies_stay_in_one_split_and_a_line_counts_them(tmp_path):
    """No image that is held out is in train, each class is held out, and copies are named."""
    files = crawled()
    done = run(
        f"rackrun convert folder set out --test-percent 10 {WORKERS}", write(tmp_path, files)
    )
    assert done.code == 0, done.said
    assert "set: 66 images with exact copies: copies stay in one split" in done.err
    found = splits_of(tmp_path / "out")
    assert sum(map(len, found.values())) == len(files)
    assert all(len(splits) == 1 for splits in split_of_images(tmp_path / "out").values())
    held = {split: Counter(kind for kind, _ in found[split].values()) for split in ("val", "test")}
    assert held == {split: {"cat": 5, "dog": 2, "fox": 3} for split in ("val", "test")}
    report = json.loads((tmp_path / "out" / "report.json").read_text())["findings"]
    assert Counter(each["found"] for each in report) == {"copy": 20 + 7, "two classes": 16 + 1}
    placeholder = sha256(drawn("not available")).hexdigest()
    assert split_of_images(tmp_path / "out")[placeholder] == {"train"}


def test_the_same_images_are_held_out_whatever_reads_them(tmp_path):
    """A zip knows checksums, folders and tars are read; processes and tasks make the same bytes."""
    files = crawled()
    write(tmp_path, files | {"set.tar": tar(files)})
    write_zip(tmp_path / "set.zip", files)
    for source in ("set", "set.zip", "set.tar"):
        assert run(f"rackrun convert folder {source} {source}.out", tmp_path).code == 0
    assert splits_of(tmp_path / "set.zip.out") == splits_of(tmp_path / "set.out")
    assert splits_of(tmp_path / "set.tar.out") == splits_of(tmp_path / "set.out")
    run("rackrun convert folder set three --workers 3", tmp_path)
    for task in (1, 0):
        run(f"rackrun convert folder set tasks --task-count 2 --task-index {task}", tmp_path)
    assert made(tmp_path / "three") == made(tmp_path / "tasks") == made(tmp_path / "set.out")


@pytest.mark.parametrize("copies", [2, 5])
def test_a_class_of_copies_alone_is_held_out_too(copies, tmp_path):
    """As where the images of a rare class were copied to have as many as others."""
    rare = {f"set/rare/{n}-{c}.jpg": drawn(n) for n in range(4) for c in range(copies)}
    write(tmp_path, rare | {f"set/common/{n}.jpg": drawn(f"common{n}") for n in range(20)})
    done = run(f"rackrun convert folder set out {WORKERS}", tmp_path)
    assert done.code == 0, done.said
    held = Counter(kind for kind, _ in splits_of(tmp_path / "out")["val"].values())
    assert held == {"common": 2, "rare": copies}


def test_what_is_appended_joins_the_split_of_its_copy(tmp_path):
    """Images that the folder has under other names bring no leak, and new ones are held out."""
    files = {f"set/{kind}/{n}.jpg": drawn(f"{kind}{n}") for kind in KINDS for n in range(20)}
    write(tmp_path, files)
    assert run(f"rackrun convert folder set out {WORKERS}", tmp_path).code == 0
    before = splits_of(tmp_path / "out")
    again = {name.replace("set/", "more/").replace(".jpg", "b.jpg"): files[name] for name in files}
    write(tmp_path, again | {f"more/cat/new{n}.jpg": drawn(f"new{n}") for n in range(10)})
    done = run(f"rackrun convert append more out {WORKERS}", tmp_path)
    assert done.code == 0, done.said
    after = splits_of(tmp_path / "out")
    assert {split: len(images) for split, images in after.items()} == {
        "train": 2 * len(before["train"]) + 9,
        "val": 2 * len(before["val"]) + 1,
    }
    assert all(len(splits) == 1 for splits in split_of_images(tmp_path / "out").values())
