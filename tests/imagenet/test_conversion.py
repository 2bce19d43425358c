"""ImageNet becomes shards: the images as they were, the odd ones named, resized on request."""

import io
import json
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from rackrun.convert import imagenet
from rackrun.convert.__main__ import main
from rackrun.convert.imagenet import Choice, Imagenet
from rackrun.convert.images.resize import Preset
from rackrun.convert.options import Packing
from rackrun.errors import DataError
from rackrun.shards.open import open_source
from rackrun.shards.samples import Sample, samples
from tests.convert.conftest import KILLED_AT, assert_only_whole_files, shown
from tests.lab.run import write

FEW = Packing(shards=3, workers=2)
PART = Choice(subset=True)


def contents(folder: Path) -> dict[str, Sample]:
    """Return every verified sample of a shard folder."""
    source = open_source(str(folder))
    return {
        sample.key: sample
        for split in source.manifest.splits
        for number in range(len(split.shards))
        for sample in samples(source, split.name, number)
    }


def test_shards_hold_the_original_bytes_under_the_right_labels(small_imagenet, tmp_path):
    """From the tar of tars to shards: bytes, labels, splits, .jpg for all members, the PNG too."""
    source, out = small_imagenet.archives(tmp_path / "raw"), tmp_path / "out"
    Imagenet(source, out, choice=PART, packing=FEW).run()
    content = contents(out)
    originals = {path.stem: path for path in small_imagenet.train + small_imagenet.val}
    assert content.keys() == originals.keys()
    for key, sample in content.items():
        assert sample.image == originals[key].data
        assert small_imagenet.wnids[sample.label] == originals[key].wnid
        assert sample.extension == ("png" if sample.image.startswith(b"\x89PNG") else "jpg")
    for path in out.glob("*.tar"):
        with tarfile.open(path) as tar:
            assert {name.partition(".")[2] for name in tar.getnames()} == {"cls", "jpg"}
    manifest = open_source(str(out)).manifest
    assert manifest.dataset == "imagenet" and manifest.classes[0].startswith("n01440764 ")
    assert {split.name: (split.samples, len(split.shards)) for split in manifest.splits} == {
        "train": (31, 3),
        "val": (12, 1),
    }
    assert [origin.name for origin in manifest.sources] == [
        "ILSVRC2012_img_train.tar",
        "ILSVRC2012_img_val.tar",
    ]


def test_the_report_finds_the_odd_files_by_their_content(small_imagenet, tmp_path):
    """The PNG under a JPEG's name, the CMYK and the gray one are named in the report."""
    source, out = small_imagenet.archives(tmp_path / "raw"), tmp_path / "out"
    Imagenet(source, out, choice=PART, packing=FEW).run()
    report = "".join(path.read_text() for path in out.glob("*report*"))
    lines = {line for line in report.splitlines() if "_2933" in line or "_90" in line}
    for name in ("n02105855_2933", "n01440764_900", "n01440764_901"):
        assert any(name in line for line in lines), report
    manifest = json.loads((out / "dataset.json").read_text())
    assert sum(manifest["report"].values()) >= 3


def test_archives_tree_and_zip_make_the_same_shards(small_imagenet, tmp_path):
    """The way in which the set lay on the disk leaves no trace in the tars."""
    ways = {
        "archives": small_imagenet.archives(tmp_path / "raw"),
        "tree": write(tmp_path / "kaggle", small_imagenet.kaggle()),
        "zip": small_imagenet.kaggle_zip(tmp_path / "kaggle.zip"),
    }
    made = []
    for way, source in ways.items():
        Imagenet(source, tmp_path / way, choice=PART, packing=FEW).run()
        made.append({path.name: path.read_bytes() for path in (tmp_path / way).glob("*.tar")})
    assert made[0] == made[1] == made[2] and len(made[0]) == 4


def test_a_shorter_side_makes_smaller_images(tmp_path):
    """The usual smaller form of ImageNet."""
    large = io.BytesIO()
    Image.effect_noise((1000, 750), 90).convert("RGB").save(large, "JPEG", quality=95)
    for split, name in (("train", "n01440764_1"), ("val", "ILSVRC2012_val_00000001")):
        write(tmp_path / "raw", {f"{split}/n01440764/{name}.JPEG": large.getvalue()})
    packing = Packing(preset=Preset(short_side=256, quality=90), workers=1)
    Imagenet(tmp_path / "raw", tmp_path / "out", PART, packing).run()
    for sample in contents(tmp_path / "out").values():
        image = Image.open(io.BytesIO(sample.image))
        assert (image.height, image.width) == (256, 341)
        assert len(sample.image) < len(large.getvalue())


def converted(source: Path, out: Path, *options: object) -> Path:
    """Convert a source by `rackrun convert imagenet` with these options; return the folder."""
    main(["imagenet", str(source), str(out), "--shards", "3", "--workers", "2", *map(str, options)])
    return out


def test_tasks_of_an_array_job_make_what_one_run_makes(small_imagenet, tmp_path):
    """Three tasks in any order read the nested tars where they lie; finish closes the folder."""
    source = small_imagenet.archives(tmp_path / "raw", "gnu")
    whole = converted(source, tmp_path / "whole", "--subset")
    for task in (2, 0, 1):
        options = ("--subset", "--task-index", task, "--task-count", 3)
        parts = converted(source, tmp_path / "parts", *options)
        assert not (parts / "dataset.json").exists()
    main(["finish", str(parts)])
    main(["verify", str(parts)])
    assert shown(parts) == shown(whole)


@pytest.mark.parametrize("moment", [3, 14, 25])
def test_the_same_command_goes_on_after_kill_9(moment, small_imagenet, tmp_path):
    """Killed before the n-th file is opened or named, it still makes every byte."""
    source, out = small_imagenet.archives(tmp_path / "raw", "gnu"), tmp_path / "out"
    args = ("imagenet", source, out, "--shards", "3", "--workers", "2", "--subset")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_AT, str(moment), *map(str, args)],
        start_new_session=True, capture_output=True, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    assert_only_whole_files(out)
    converted(source, out, "--subset")
    main(["verify", str(out)])
    assert shown(out) == shown(converted(source, tmp_path / "whole", "--subset"))


def test_a_part_by_classes_and_number_is_a_set_of_its_own(small_imagenet, tmp_path):
    """`--classes 3 --limit 2` as it is typed: three classes of two images a split, verified."""
    source = small_imagenet.archives(tmp_path / "raw")
    out = converted(source, tmp_path / "out", "--classes", "3", "--limit", "2")
    main(["verify", str(out)])
    manifest = open_source(str(out)).manifest
    assert [name.split(" ", 1)[0] for name in manifest.classes] == small_imagenet.wnids[:3]
    assert {split.name: split.samples for split in manifest.splits} == {"train": 6, "val": 6}
    assert sorted(sample.label for sample in contents(out).values()) == sorted(4 * [0, 1, 2])


def test_of_the_full_imagenet_nothing_may_be_missing_from_the_shards(
    small_imagenet, tmp_path, monkeypatch
):
    """The official counts are those of what was stored: one damaged image is one too many."""
    monkeypatch.setattr(imagenet, "OFFICIAL", {"train": 31, "val": 12})
    monkeypatch.setattr(imagenet, "OFFICIAL_CLASSES", 4)
    monkeypatch.setattr(imagenet, "OFFICIAL_PER_CLASS", {"train": range(7, 10), "val": range(3, 4)})
    source = small_imagenet.folders(tmp_path / "raw")
    (damaged, *_) = source.glob("train/*/*.JPEG")
    damaged.write_bytes(bytes(damaged.stat().st_size))
    packing = Packing(shards=2, workers=1)
    with pytest.raises(DataError, match="1 of 43 images cannot be used .* 0 may be missing"):
        Imagenet(source, tmp_path / "out", choice=Choice(), packing=packing).run()
    allowed = Packing(shards=2, workers=1, allow_left_out=1)
    Imagenet(source, tmp_path / "out", choice=Choice(), packing=allowed).run()
    assert len(contents(tmp_path / "out")) == 42
