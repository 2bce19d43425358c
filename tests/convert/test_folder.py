"""Any folder of class folders becomes a data set, and what cannot be right is refused."""

import io
import os
from pathlib import Path

import pytest
from PIL import Image

from rackrun.convert.__main__ import main
from rackrun.shards.open import open_source
from tests.convert.conftest import manifest_of
from tests.lab.data import drawn, every_sample, everything, rotated, tar, textured, write_zip
from tests.lab.run import write
from tests.lab.sources import classes


def test_class_folders_are_the_classes(tmp_path, convert):
    """Labels are the sorted folder names, sub-folders belong to their class, keys are unique."""
    files = classes(4, "tulip", "aster") | {"aster/wild/x y.png": drawn("x", format="PNG")}
    out = convert("folder", write(tmp_path / "my flowers", files))
    manifest = manifest_of(out)
    assert manifest.dataset == "my_flowers" and manifest.classes == ("aster", "tulip")
    samples = {sample.key: (sample.label, sample.image) for sample in every_sample(out)}
    assert len(samples) == 9
    assert samples["tulip_2"] == (1, files["tulip/2.jpg"])
    (wild,) = (key for key in samples if key.startswith("aster_wild_x_y-"))
    assert samples[wild] == (0, files["aster/wild/x y.png"])


def test_names_of_every_kind(tmp_path, convert):
    """Spaces, dots, umlauts, bytes that are no text, one stem twice: all become safe keys."""
    folder = write(tmp_path / "set", classes(2, "Äpfel", "b.c"))
    for name in (b"a b.jpg", b"a.b.jpg", "ü.jpg".encode(), b"\xff\xfe.jpg", b"a.jpg", b"a.jpeg"):
        Path(os.fsdecode(os.fsencode(folder / "b.c") + b"/" + name)).write_bytes(drawn(name))
    out = convert("folder", folder)
    keys = [sample.key for sample in every_sample(out)]
    assert len(set(keys)) == len(keys) == 10
    assert all(key.isascii() and "." not in key and " " not in key for key in keys)
    assert manifest_of(out).classes == ("b.c", "Äpfel")


def test_the_key_of_an_image_that_begins_with_its_class(tmp_path, convert):
    """n01440764/n01440764_10026.JPEG keeps its own name, and what clashes its suffix."""
    wnids = ("n01", "n01_1")
    files = {f"{wnid}/{wnid}_{n}.JPEG": drawn(f"{wnid}{n}") for wnid in wnids for n in range(2)}
    out = convert("folder", write(tmp_path / "set", files | {"n01/1_0.jpg": drawn(9)}))
    assert sorted(sample.key for sample in every_sample(out)) == [
        *("n01_0", "n01_1", "n01_1_0", "n01_1_0_JPEG", "n01_1_1")
    ]


def test_a_set_assembled_of_links_is_converted(tmp_path, convert, capsys):
    """train -> /nvme/train is how ImageNet is put together on clusters: links are counted."""
    write(tmp_path / "nvme", classes(6, "a", "b"))
    (tmp_path / "nvme" / "b" / "more").symlink_to(tmp_path / "ssd")
    write(tmp_path / "ssd", {"9.jpg": drawn(9)})
    folder = write(tmp_path / "set", {f"val/{kind}/v.jpg": drawn(kind) for kind in "ab"})
    (folder / "train").symlink_to(tmp_path / "nvme")
    keys = {sample.key for sample in every_sample(convert("folder", folder))}
    assert len(keys) == 15 and "b_more_9" in keys
    assert "2 symbolic links followed: train, train/b/more" in capsys.readouterr().err


TRAIN = {f"train/{name}": data for name, data in classes(10, "a", "b").items()}
HELD_OUT = [("train", 18), ("val", 2)]


@pytest.mark.parametrize(
    ("files", "options", "splits"),
    [
        (TRAIN | {"test/a/0.jpg": drawn("t")}, (), [("test", 1), *HELD_OUT]),
        (TRAIN | {"test/unknown/0.jpg": drawn("t")}, (), HELD_OUT),
        (TRAIN, ("--test-percent", 20), [("test", 4), ("train", 14), ("val", 2)]),
        (
            *(TRAIN, ("--test-percent", 50, "--val-percent", 30)),
            [("test", 10), ("train", 4), ("val", 6)],
        ),
        (TRAIN | {"test/0.jpg": drawn("t")}, ("--val-percent", 0), [("train", 20)]),
        (TRAIN, (), HELD_OUT),
        (TRAIN | {"Val/a/0v.jpg": drawn("v")}, (), [("train", 20), ("val", 1)]),
        ({n.replace("train", "Training"): d for n, d in TRAIN.items()}, (), HELD_OUT),
        (classes(2, "a", "b"), (), [("train", 2), ("val", 2)]),
        (
            classes(9, "train", "test", "car"),
            ("--allow", "split-names"),
            [("train", 24), ("val", 3)],
        ),
    ],
)
def test_there_is_a_validation_part_unless_it_is_unwanted(
    files, options, splits, tmp_path, convert
):
    """train/ with test/, alone, with Val/; two images a class; a class that is called train.

    Percent are of all images of a class, for validation as for tests.
    """
    manifest = manifest_of(convert("folder", write(tmp_path / "set", files), *options))
    assert [(split.name, split.samples) for split in manifest.splits] == splits


@pytest.mark.parametrize("top", ["", "photos/", "photos/train/"])
def test_a_zip_of_class_folders_is_converted_like_the_folder(top, tmp_path, convert):
    """Also with a folder around them, as a file manager packs one, and with train/ in it."""
    files = {f"{top}{name}": data for name, data in classes(4, "aster", "tulip").items()}
    out = convert("folder", write_zip(tmp_path / "photos.zip", files))
    manifest = manifest_of(out)
    assert manifest.classes == ("aster", "tulip")
    assert sorted(sample.image for sample in every_sample(out)) == sorted(files.values())


@pytest.mark.parametrize(
    ("name", "layout"), [("p.tgz", "w:gz"), ("p.tar.bz2", "w:bz2"), ("p", "w:xz")]
)
def test_a_tar_that_is_compressed_as_a_whole_is_unpacked(name, layout, tmp_path, convert, capsys):
    """Whatever it is called: the shards are those of the folder, and nothing else stays in OUT."""
    files = {f"photos/{each}": data for each, data in classes(4, "aster", "tulip").items()}
    whole = convert("folder", write(tmp_path / "set", files) / "photos", "--name", "p", out="whole")
    (tmp_path / name).write_bytes(tar(files, layout))
    out = convert("folder", tmp_path / name, "--name", "p")
    assert f"{name}: unpacking it into {out}" in capsys.readouterr().err
    for path in whole.glob("*.tar"):
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == [".lock"]


def test_a_class_that_is_no_text_is_written_down_as_text(tmp_path, convert, capsys):
    """A folder from a Latin-1 machine, and a name that would rename the window: shown, kept."""
    folder = write(tmp_path / "set", classes(2, "a", "\x1b]0;owned\x07\n"))
    latin = Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9"))
    write(latin, {"0.jpg": drawn(0), "1.jpg": drawn(1)})
    latin = latin.rename(Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe8")))
    source = folder.rename(Path(os.fsdecode(os.fsencode(tmp_path) + b"/s\xe9t")))
    out = convert("folder", source)
    assert "caf\\xe8" in manifest_of(out).classes and manifest_of(out).sources[0].name == "s\\xe9t"
    main(["summary", str(out)])
    main(["verify", str(out)])
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err and "owned" in printed.out


def test_own_images_stay_as_they_lie_where_that_is_asked_for(tmp_path, convert, monkeypatch):
    """--exif ignore: counted, and stored byte for byte; the manifest says so. HEIC is left out
    where pillow-heif is missing."""
    monkeypatch.setattr("rackrun.convert.readers.records.READS_HEIC", False)
    odd = {"a/side.jpg": rotated("side"), "b/phone.heic": b"not read"}
    source = write(tmp_path / "set", classes(3, "a", "b") | odd)
    out, kept = convert("folder", source), convert("folder", source, "--exif", "ignore", out="kept")
    assert manifest_of(out).upright and not manifest_of(kept).upright
    assert manifest_of(out).report == {"turned": 1, "heic": 1}
    assert manifest_of(kept).report["rotated"] == 1
    assert odd["a/side.jpg"] in [sample.image for sample in every_sample(kept)]


def test_a_class_that_is_called_like_a_split_among_others(tmp_path, convert):
    """A train station and a test tube are classes among others, with no word about it."""
    names = ("bridge", "test_tube", "train_station", "river", "street")
    folder = write(tmp_path / "set", classes(2, *names))
    assert len(manifest_of(convert("folder", folder)).classes) == 5


def test_what_is_turned_and_made_smaller_is_encoded_once(tmp_path, convert):
    """The stored pixels are those of one resize of the original, at the quality asked for."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = textured(1, (400, 300), exif=exif, quality=98)
    source = write(tmp_path / "set", classes(3, "a", "b") | {"a/x.jpg": data})
    out = convert("folder", source, "--short-side", 60)
    (image,) = (sample.image for sample in every_sample(out) if sample.key == "a_x")
    original = Image.open(io.BytesIO(data)).transpose(Image.Transpose.ROTATE_270)
    expected = io.BytesIO()
    original.resize((60, 80), Image.Resampling.BICUBIC).save(expected, "JPEG", quality=90)
    assert image == expected.getvalue()


def test_what_is_excluded_is_left_out_and_counted(tmp_path, convert):
    """By name or by path, files and folders; a folder without rights is not entered."""
    files = classes(4, "a", "b", "drafts") | {"a/old/x.jpg": drawn("x"), "b/y_copy.jpg": drawn("y")}
    source = write(tmp_path / "set", files)
    patterns = [word for each in ("drafts", "old", "b/*_copy.jpg") for word in ("--exclude", each)]
    out = convert("folder", source, *patterns)
    assert manifest_of(out).classes == ("a", "b") and len(every_sample(out)) == 8
    assert manifest_of(out).report["excluded"] == 3


def test_a_file_chooses_classes(tmp_path, convert, capsys):
    """Those that it does not name are left out, in a line."""
    source = write(tmp_path / "set", classes(4, "a", "b", "c"))
    (tmp_path / "names.txt").write_text("c\na\n")
    out = convert("folder", source, "--classes", tmp_path / "names.txt")
    assert manifest_of(out).classes == ("c", "a") and len(every_sample(out)) == 8
    assert "1 of the 3 classes of the source are left out: b" in capsys.readouterr().err


def test_images_of_one_folder_stay_on_one_side(tmp_path, convert):
    """Frames of a video are all in train, all in val or all in test, whatever their class."""
    files = {
        f"{kind}/video{video}/{n}.jpg": drawn(f"{kind}{video}{n}")
        for kind in "ab"
        for video in range(10)
        for n in range(3)
    }
    source = write(tmp_path / "set", files)
    out = convert("folder", source, "--group-level", 1, "--val-percent", 20, "--test-percent", 10)
    source = open_source(str(out))
    videos = {
        split.name: {sample.key.split("_")[1] for sample in everything(source, split.name)}
        for split in source.manifest.splits
    }
    assert {name: len(each) for name, each in videos.items()} == {"test": 1, "train": 7, "val": 2}
    assert sum(map(len, videos.values())) == 10
