"""Any folder of class folders becomes a data set, and what cannot be right is refused."""

import io
import json
import os
import struct
import tarfile
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rackrun.convert.__main__ import main
from rackrun.errors import DataError
from rackrun.shards.index import Manifest
from rackrun.shards.open import open_source
from rackrun.training.data.decode import orientation
from tests.convert.conftest import everything
from tests.lab.data import drawn, rotated, tar, textured, write_zip
from tests.lab.data import everything as samples_of
from tests.lab.run import write


def manifest_of(folder: Path) -> Manifest:
    return Manifest.parse((folder / "dataset.json").read_bytes(), "")


def classes(count: int, *names: str) -> dict[str, bytes]:
    return {f"{name}/{n}.jpg": drawn(f"{name} {n}") for name in names for n in range(count)}


def test_class_folders_are_the_classes(tmp_path, convert):
    """Labels are the sorted folder names, sub-folders belong to their class, keys are unique."""
    files = classes(4, "tulip", "aster") | {"aster/wild/x y.png": drawn("x", format="PNG")}
    out = convert("folder", write(tmp_path / "my flowers", files))
    manifest = manifest_of(out)
    assert manifest.dataset == "my_flowers" and manifest.classes == ("aster", "tulip")
    samples = {sample.key: (sample.label, sample.image) for sample in everything(out)}
    assert len(samples) == 9
    assert samples["tulip_2"] == (1, files["tulip/2.jpg"])
    (wild,) = (key for key in samples if key.startswith("aster_wild_x_y-"))
    assert samples[wild] == (0, files["aster/wild/x y.png"])


def test_given_splits_are_kept(tmp_path, convert):
    """With train/ and val/ above the classes nothing is drawn; loose files are named."""
    train = {f"train/{name}": data for name, data in classes(5, "a", "b").items()}
    val = {f"validation/{kind}/{n}v.jpg": drawn(f"{kind} {n} v") for kind in "ab" for n in range(2)}
    loose = {"train/loose.jpg": drawn("loose"), "test/a/0.jpg": drawn("test")}
    out = convert("folder", write(tmp_path / "set", train | val | loose))
    manifest = manifest_of(out)
    assert [(split.name, split.samples) for split in manifest.splits] == [
        ("test", 1),
        ("train", 10),
        ("val", 4),
    ]
    assert manifest.report["unlabelled"] == 1


def test_names_of_every_kind(tmp_path, convert):
    """Spaces, dots, umlauts, bytes that are no text, one stem twice: all become safe keys."""
    folder = write(tmp_path / "set", classes(2, "Äpfel", "b.c"))
    for name in (b"a b.jpg", b"a.b.jpg", "ü.jpg".encode(), b"\xff\xfe.jpg", b"a.jpg", b"a.jpeg"):
        Path(os.fsdecode(os.fsencode(folder / "b.c") + b"/" + name)).write_bytes(drawn(name))
    out = convert("folder", folder)
    keys = [sample.key for sample in everything(out)]
    assert len(set(keys)) == len(keys) == 10
    assert all(key.isascii() and "." not in key and " " not in key for key in keys)
    assert manifest_of(out).classes == ("b.c", "Äpfel")


def test_the_key_of_an_image_that_begins_with_its_class(tmp_path, convert):
    """n01440764/n01440764_10026.JPEG keeps its own name, and what clashes its suffix."""
    files = {f"{wnid}/{wnid}_{n}.JPEG": drawn(n) for wnid in ("n01", "n01_1") for n in range(2)}
    out = convert("folder", write(tmp_path / "set", files | {"n01/1_0.jpg": drawn(9)}))
    assert sorted(sample.key for sample in everything(out)) == [
        *("n01_0", "n01_1", "n01_1_0", "n01_1_0_JPEG", "n01_1_1")
    ]


def test_links_within_the_folder_are_followed(tmp_path, convert):
    """A file or a folder linked from elsewhere in the set: as if it were copied."""
    folder = write(tmp_path / "set", classes(6, "a", "b"))
    (folder / "a" / "linked.jpg").symlink_to("../b/0.jpg")
    (folder / "a" / "more").symlink_to(folder / "b", target_is_directory=True)
    out = convert("folder", folder, "--allow", "leaks")
    samples = {sample.key: sample.image for sample in everything(out)}
    assert len(samples) == 6 + 6 + 1 + 6
    assert samples["a_linked"] == samples["a_more_0"] == samples["b_0"]


def test_a_set_assembled_of_links_is_converted(tmp_path, convert, capsys):
    """train -> /nvme/train is how ImageNet is put together on clusters: links are counted."""
    write(tmp_path / "nvme", classes(6, "a", "b"))
    (tmp_path / "nvme" / "b" / "more").symlink_to(tmp_path / "ssd")
    write(tmp_path / "ssd", {"9.jpg": drawn(9)})
    folder = write(tmp_path / "set", {f"val/{kind}/v.jpg": drawn(kind) for kind in "ab"})
    (folder / "train").symlink_to(tmp_path / "nvme")
    keys = {sample.key for sample in everything(convert("folder", folder))}
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
    assert sorted(sample.image for sample in everything(out)) == sorted(files.values())


def test_names_that_would_be_one_key_are_told_apart(tmp_path, convert):
    """sub/a, sub_a and two that differ by case: all are kept, also when unpacked on a Mac."""
    names = ["sub/a.jpg", "sub_a.jpg", "sub_a.jpeg", "sub/a.jpeg", "x.jpg", "X.jpg", "X.JPG"]
    files = {f"a/{name}": drawn(name) for name in names} | classes(1, "b")
    out = convert("folder", write(tmp_path / "set", files), "--val-percent", 0)
    keys = [sample.key.lower() for sample in everything(out)]
    assert len(set(keys)) == len(keys) == 8 and "a_sub_a" in keys


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


def test_own_images_stand_upright_and_other_formats_become_jpegs(tmp_path, convert, monkeypatch):
    """EXIF is applied and counted, unless it is not wanted; TIFF and AVIF are read, and HEIC is
    not where pillow-heif is missing.
    """
    monkeypatch.setattr("rackrun.shards.pillow.foreign_formats", lambda: ("TIFF", "AVIF"))
    monkeypatch.setattr("rackrun.convert.readers.records.READS_HEIC", False)
    odd = {
        "a/side.jpg": rotated("side"),
        "a/scan.tif": drawn("scan", format="TIFF"),
        "b/new.avif": drawn("new", format="AVIF"),
        "b/phone.heic": b"not read",
        "b/cut.tif": drawn("cut", format="TIFF")[:-300],
    }
    source = write(tmp_path / "set", classes(3, "a", "b") | odd)
    out = convert("folder", source)
    report = manifest_of(out).report
    assert report == {"heic": 1, "re-encoded": 2, "turned": 1, "undecodable": 1}
    images = {sample.key: Image.open(io.BytesIO(sample.image)) for sample in everything(out)}
    assert images["a_side"].size == (36, 48) and not images["a_side"].getexif()
    stored = np.asarray(
        Image.open(io.BytesIO(rotated("side"))).transpose(Image.Transpose.ROTATE_270)
    )
    assert np.abs(np.asarray(images["a_side"]).astype(int) - stored).mean() < 2
    for key, name in (("a_scan", "a/scan.tif"), ("b_new", "b/new.avif")):
        assert images[key].format == "JPEG"
        pixels = np.asarray(Image.open(io.BytesIO(odd[name])).convert("RGB")).astype(int)
        assert np.abs(np.asarray(images[key]) - pixels).mean() < 3
    assert manifest_of(out).upright
    kept = convert("folder", source, "--exif", "ignore", out="kept")
    assert not manifest_of(kept).upright
    assert manifest_of(kept).report["rotated"] == 1
    assert odd["a/side.jpg"] in [sample.image for sample in everything(kept)]


def test_pictures_of_phones_become_jpegs(tmp_path, convert):
    """HEIC is read where pillow-heif is installed; one that is cut off is left out and counted."""
    import pillow_heif

    pillow_heif.register_heif_opener()
    phone = drawn("phone", format="HEIF", quality=95)
    odd = {"a/phone.HEIC": phone, "b/half.heif": phone[: len(phone) // 2]}
    out = convert("folder", write(tmp_path / "set", classes(3, "a", "b") | odd))
    assert manifest_of(out).report == {"re-encoded": 1, "undecodable": 1}
    (image,) = (Image.open(io.BytesIO(s.image)) for s in everything(out) if s.key == "a_phone")
    pixels = np.asarray(Image.open(io.BytesIO(phone)).convert("RGB")).astype(int)
    assert image.format == "JPEG"
    assert np.abs(np.asarray(image) - pixels).mean() < 3


def test_litter_of_macos_is_no_class(tmp_path, convert):
    """A zip unpacked elsewhere leaves __MACOSX beside the classes, or beside train and val."""
    files = classes(4, "a", "b") | {"__MACOSX/a/._0.jpg": b"x"}
    assert manifest_of(convert("folder", write(tmp_path / "set", files))).classes == (
        "a",
        "b",
    )
    files = {
        f"{part}/{n}.jpg": drawn(f"{part} {n}")
        for part in ("train/a", "train/b", "val/b")
        for n in range(4)
    } | {"__MACOSX/train/._a": b"x", "train/__MACOSX/a/._0.jpg": b"x"}
    out = convert("folder", write(tmp_path / "parts", files), out="parts-out")
    assert manifest_of(out).classes == ("a", "b")


TURNS = {  # EXIF 2.32, tag 0x0112: which of the stored pixels becomes row 0, column 0, and how
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: pixels[::-1].swapaxes(0, 1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: pixels[:, ::-1].swapaxes(0, 1),
}


@pytest.mark.parametrize("orientation", TURNS)
def test_every_orientation_is_turned_upright(tmp_path, convert, orientation):
    """The pixels are those of the stored image, turned and mirrored as EXIF defines it."""
    corners = np.full((32, 48, 3), 90, np.uint8)  # each corner of its own brightness
    for number, (row, column) in enumerate([(0, 0), (0, 24), (16, 0), (16, 24)]):
        corners[row : row + 16, column : column + 24] = 60 * number + 20
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = io.BytesIO()
    Image.fromarray(corners).save(stored, "JPEG", quality=95, exif=exif)
    files = classes(2, "a", "b") | {"a/turned.jpg": stored.getvalue()}
    out = convert("folder", write(tmp_path / "set", files), "--val-percent", 0)
    (image,) = (each.image for each in everything(out) if each.key == "a_turned")
    pixels = np.asarray(Image.open(io.BytesIO(image)).convert("RGB")).astype(int)
    expected = TURNS[orientation](corners)
    assert pixels.shape == expected.shape and np.abs(pixels - expected).max() < 12
    assert (image == stored.getvalue()) == (orientation == 1)


@pytest.mark.parametrize("name", ["a/no.tif", "a/no.avif"])
def test_what_pillow_does_not_recognize_has_a_reason_for_people(tmp_path, convert, name):
    """Pillow's own text would be the address of a buffer."""
    folder = write(tmp_path / "set", classes(4, "a", "b") | {name: b"no image " * 9})
    report = (convert("folder", folder) / "report.json").read_text()
    assert "BytesIO" not in report and "begins with b'no image'" in report


def test_of_members_with_one_name_the_last_counts(tmp_path, convert):
    """tar -r and zip's mode "a" leave the old member in the archive: the report names it."""
    files, new = classes(4, "a", "b"), {"a/0.jpg": drawn("corrected")}
    write_zip(tmp_path / "set.zip", files)
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(tmp_path / "set.zip", "a") as it:
        it.writestr("a/0.jpg", new["a/0.jpg"])
    (tmp_path / "set.tar").write_bytes(tar(files)[: -(tarfile.RECORDSIZE // 2)])
    with tarfile.open(tmp_path / "set.tar", "a") as archive:
        archive.addfile(*member("a/0.jpg", new["a/0.jpg"]))
    for name in ("set.zip", "set.tar"):
        out = convert("folder", tmp_path / name, out=f"{name}.out")
        assert manifest_of(out).report["replaced"] == 1
        samples = {sample.key: sample.image for sample in everything(out)}
        assert len(samples) == 8 and samples["a_0"] == new["a/0.jpg"]


def member(name: str, data: bytes) -> tuple[tarfile.TarInfo, io.BytesIO]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info, io.BytesIO(data)


def test_folders_of_systems_are_left_out_and_counted(tmp_path, convert):
    """The thumbnails of a NAS and the system's own folders are no images and no classes."""
    files = classes(4, "a", "b") | {
        "a/@eaDir/0.jpg/SYNOFILE_THUMB_M.jpg": drawn("thumbnail"),
        "@eaDir/a/SYNOFILE_THUMB_M.jpg": drawn("other thumbnail"),
        "#recycle/a/0.jpg": drawn("deleted"),
        "$RECYCLE.BIN/S-1-5/x.jpg": drawn("bin"),
    }
    folder = write(tmp_path / "set", files)
    (folder / "lost+found").mkdir(mode=0)
    names = ["#recycle", "$RECYCLE.BIN", "@eaDir", "a/@eaDir"]
    archive = write_zip(tmp_path / "set.zip", files)
    for source, found in ((folder, [*names, "lost+found"]), (archive, names)):
        out = convert("folder", source, out=f"{source.suffix}-out")
        assert manifest_of(out).classes == ("a", "b") and len(everything(out)) == 8
        report = json.loads((out / "report.json").read_text())["findings"]
        assert sorted(each["file"] for each in report if each["found"] == "system") == sorted(found)


def nested(*names: str) -> dict[str, bytes]:
    return {
        f"{name}/{file}": drawn(name + file)
        for name in names
        for file in ("cats/0.jpg", "cats/1.jpg", "dogs/0.jpg")
    }


def below(names: str, *classes: str) -> dict[str, bytes]:
    return {f"{top}/{name}": data for top in names for name, data in nested(*classes).items()}


LOOKS_LIKE_SPLITS = [
    (nested("training_set/training_set", "test_set/test_set"), "test_set, training_set look like"),
    (nested("seg_train/seg_train", "seg_test/seg_test", "seg_pred"), "seg_.* look like splits"),
    (classes(3, "trainA", "testA"), "testA, trainA look like splits"),
    (below("ab", "train", "val"), "set/a: train, val in it look like splits"),
    (
        classes(3, "bus", "car", "train/steam", "train/electric"),
        "train/ is the training split, so the 6 images in bus, car have no class",
    ),
]


@pytest.mark.parametrize(("files", "says"), LOOKS_LIKE_SPLITS)
def test_splits_are_not_taken_for_classes(files, says, tmp_path, convert):
    """Nor a class for a split, until it is said that all folders are classes."""
    folder = write(tmp_path / "set", files)
    with pytest.raises(DataError, match=rf"{says}.*add --allow split-names"):
        convert("folder", folder)
    tops = sorted({name.partition("/")[0] for name in files})
    allowed = "--allow", "split-names", "--allow", "leaks"
    assert manifest_of(convert("folder", folder, *allowed)).classes == tuple(tops)


def test_a_class_that_is_called_like_a_split_among_others(tmp_path, convert):
    """A train station and a test tube are classes among others, with no word about it."""
    names = ("bridge", "test_tube", "train_station", "river", "street")
    folder = write(tmp_path / "set", classes(2, *names))
    assert len(manifest_of(convert("folder", folder)).classes) == 5


def test_classes_that_a_split_lacks_are_said(tmp_path, convert, capsys):
    """Here two classes have no validation image."""
    files = {f"train/{name}": data for name, data in classes(3, "a", "b", "c").items()}
    convert("folder", write(tmp_path / "set", files | {"val/a/v.jpg": drawn("v")}))
    assert "val has no image of 2 of 3 classes: b, c" in capsys.readouterr().err


def test_an_orientation_stands_in_many_places(tmp_path, convert):
    """In EXIF of WebP and PNG, as a LONG, in XMP: what is stored is upright, as Pillow reads it.

    So is what `predict` makes of the same file.
    """
    exif = Image.Exif()
    exif[0x0112] = 6
    long = struct.pack(">LHHHLLL", 8, 1, 0x0112, 4, 1, 6, 0)
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="6"/></x:xmpmeta>'
    odd = {
        "a/x.webp": drawn(1, format="WEBP", exif=exif),
        "a/y.png": drawn(2, format="PNG", exif=exif),
        "b/x.jpg": drawn(3, exif=b"Exif\0\0MM\0*" + long),
        "b/y.jpg": drawn(4, xmp=xmp),
        "b/z.jpg": drawn(5, exif=b"Exif\0\0MM\0*" + long[:9]),
    }
    out = convert("folder", write(tmp_path / "set", classes(3, "a", "b") | odd))
    assert manifest_of(out).report["turned"] == 4
    images = {sample.key: sample.image for sample in everything(out)}
    for key in ("a_x", "a_y", "b_x", "b_y"):
        assert Image.open(io.BytesIO(images[key])).size == (36, 48)
    assert images["b_z"] == odd["b/z.jpg"]  # its EXIF is malformed
    assert [orientation(data) for data in odd.values()] == [6, 6, 6, 6, 1]


def test_what_is_turned_and_made_smaller_is_encoded_once(tmp_path, convert):
    """The stored pixels are those of one resize of the original, at the quality asked for."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = textured(1, (400, 300), exif=exif, quality=98)
    source = write(tmp_path / "set", classes(3, "a", "b") | {"a/x.jpg": data})
    out = convert("folder", source, "--short-side", 60)
    (image,) = (sample.image for sample in everything(out) if sample.key == "a_x")
    original = Image.open(io.BytesIO(data)).transpose(Image.Transpose.ROTATE_270)
    expected = io.BytesIO()
    original.resize((60, 80), Image.Resampling.BICUBIC).save(expected, "JPEG", quality=90)
    assert image == expected.getvalue()


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_what_is_excluded_is_left_out_and_counted(kind, tmp_path, convert):
    """By name or by path, files and folders; a folder without rights is not entered."""
    files = classes(4, "a", "b", "drafts") | {"a/old/x.jpg": drawn("x"), "b/y_copy.jpg": drawn("y")}
    source = write(tmp_path / "set", files)
    if kind == "zip":
        source = write_zip(tmp_path / "set.zip", files)
    patterns = [word for each in ("drafts", "a/old", "*_copy.jpg") for word in ("--exclude", each)]
    out = convert("folder", source, *patterns)
    assert manifest_of(out).classes == ("a", "b") and len(everything(out)) == 8
    assert manifest_of(out).report["excluded"] == (3 if kind == "folder" else 6)


def test_classes_have_the_order_of_a_file(tmp_path, convert):
    """With one that has no image."""
    source = write(tmp_path / "set", classes(4, "a", "b"))
    (tmp_path / "names.txt").write_text("b\nnone\na\n")
    out = convert("folder", source, "--classes", tmp_path / "names.txt")
    assert manifest_of(out).classes == ("b", "none", "a")
    assert {sample.label for sample in everything(out) if sample.key.startswith("a_")} == {2}


def test_a_file_chooses_classes(tmp_path, convert, capsys):
    """Those that it does not name are left out, in a line."""
    source = write(tmp_path / "set", classes(4, "a", "b", "c"))
    (tmp_path / "names.txt").write_text("c\na\n")
    out = convert("folder", source, "--classes", tmp_path / "names.txt")
    assert manifest_of(out).classes == ("c", "a") and len(everything(out)) == 8
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
        split.name: {sample.key.split("_")[1] for sample in samples_of(source, split.name)}
        for split in source.manifest.splits
    }
    assert {name: len(each) for name, each in videos.items()} == {"test": 1, "train": 7, "val": 2}
    assert sum(map(len, videos.values())) == 10
