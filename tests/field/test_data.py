"""What people met when they packed images, made after public reports; each test is a kind."""

import io
import json
import os
import shutil
import struct
import unicodedata
import zipfile
import zlib

import pyarrow
import pytest
from PIL import Image, PngImagePlugin
from pyarrow import parquet

from rackrun import open_source
from tests.lab.data import drawn, tar
from tests.lab.foreign import (
    chunk,
    classes,
    count,
    png,
    stored,
    tiny_gif,
    zip_without_zip64,
)
from tests.lab.run import write

KINDS = ("cat", "dog")


def each_kind(count: int) -> list[tuple[str, int]]:
    return [(kind, number) for kind in KINDS for number in range(count)]


def pictures(prefix: str = "set", count: int = 12) -> dict[str, bytes]:
    return {f"{prefix}/{kind}/{n:03d}.jpg": drawn(f"{kind}{n}") for kind, n in each_kind(count)}


def samples(first: int, last: int) -> bytes:
    """Return a tar of WebDataset samples of two classes."""
    members = [
        ((f"{n:05d}.cls", str(n % 2).encode()), (f"{n:05d}.jpg", drawn(n)))
        for n in range(first, last)
    ]
    return tar([member for sample in members for member in sample])


def upright(data: bytes) -> bool:
    """Return whether a picture with a red upper half lies as it was drawn."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    above, below = image.getpixel((20, 5)), image.getpixel((20, image.height - 5))
    return above[0] > 100 and below[2] > 100


def lying(form: str, exif: Image.Exif | bytes, seed: int) -> bytes:
    """Return a picture with a red upper half that only its EXIF turns upright."""
    image = Image.new("RGB", (40, 40), (200, 0, 0))
    image.paste((0, 0, 200), (0, 20, 40, 40))
    image = image.transpose(Image.Transpose.ROTATE_90)
    image.putpixel((0, 0), (seed, 0, 0))
    out = io.BytesIO()
    image.save(out, form, exif=exif, **({"quality": 95} if form in ("JPEG", "WEBP") else {}))
    return out.getvalue()


def exif(orientation: int = 6) -> Image.Exif:
    result = Image.Exif()
    result[0x0112] = orientation
    return result


# Archives


def test_a_zip_of_macos_with_more_entries_than_its_end_counts_is_read_whole(cli, tmp_path):
    def members():
        for number in range(400):
            yield f"photos/class{number % 20:02d}/{number:05d}.gif".encode(), tiny_gif(number)
        for number in range(65_500):
            yield f"__MACOSX/photos/class{number % 20:02d}/._{number}.gif".encode(), b"\0\5\x16\7"

    (tmp_path / "mac.zip").write_bytes(zip_without_zip64(members()))
    result = cli("rackrun convert folder mac.zip out")
    assert result.code == 0, result
    assert (count(tmp_path / "out"), len(classes(tmp_path / "out"))) == (400, 20)


def test_names_in_utf_8_without_the_flag_are_read_as_finder_shows_them(cli, tmp_path):
    kinds = ["Bären", "Füchse", "日本猫"]
    names = [f"tiere/{kind}/{number}.gif" for kind in kinds for number in range(8)]
    members = [
        (unicodedata.normalize("NFD", name).encode(), tiny_gif(number))
        for number, name in enumerate(names)
    ]
    (tmp_path / "tiere.zip").write_bytes(zip_without_zip64(members))
    assert cli("rackrun convert folder tiere.zip out").code == 0
    shown = [unicodedata.normalize("NFC", name) for name in classes(tmp_path / "out")]
    assert sorted(shown) == sorted(kinds)


PROPER = "бär/1.gif".encode()
UNICODE_PATH = struct.pack("<HHBL", 0x7075, 5 + len(PROPER), 1, zlib.crc32(b"b\x84r/1.gif"))


@pytest.mark.parametrize(
    ("name", "extra", "system", "kind"),
    [
        ("日本猫/1.gif".encode(), b"", 3, "日本猫"),
        (b"b\x84r/1.gif", b"", 0, "bär"),
        (b"b\x84r/1.gif", UNICODE_PATH + PROPER, 0, "бär"),
        (b"other/1.gif", UNICODE_PATH + PROPER, 0, "other"),
        (b"cow\\1.gif", b"", 0, "cow"),
    ],
    ids=["UTF-8 without its flag", "code page 437", "Info-ZIP", "another name's", "backslashes"],
)
def test_names_in_zips_are_read_as_programs_write_them(name, extra, system, kind, cli, tmp_path):
    info = zipfile.ZipInfo("x" * len(name))
    info.extra, info.create_system = extra, system
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(info, tiny_gif(99))
        for number in range(4):
            archive.writestr(f"sheep/{number}.gif", tiny_gif(number))
    data = (tmp_path / "a.zip").read_bytes().replace(b"x" * len(name), name)
    (tmp_path / "a.zip").write_bytes(data)
    result = cli("rackrun convert folder a.zip out --val-percent 0")
    assert result.code == 0, result
    assert classes(tmp_path / "out") == sorted([kind, "sheep"])


@pytest.mark.parametrize("before", ["./", "./set/", "/data/"], ids=str)
def test_a_tar_is_read_wherever_its_names_begin(before, cli, tmp_path):
    members = {before + name.removeprefix("set/"): data for name, data in pictures().items()}
    write(tmp_path, {"set.tar": tar(members)})
    result = cli("rackrun convert folder set.tar out")
    assert result.code == 0, result
    assert (count(tmp_path / "out"), classes(tmp_path / "out")) == (24, ["cat", "dog"])


def test_names_in_a_code_page_are_said_to_be_guessed(cli, tmp_path):
    names = [
        f"{kind}/{number}.gif".encode("shift-jis") for kind in ("犬", "猫") for number in range(8)
    ]
    members = [(b"d/" + name, tiny_gif(number)) for number, name in enumerate(names)]
    (tmp_path / "sjis.zip").write_bytes(zip_without_zip64(members, made_by=0x14))
    result = cli("rackrun convert folder sjis.zip out")
    assert result.code == 0 and "16 names in an unknown code page" in result.err, result


def test_two_webdataset_tars_joined_by_cat_are_refused(cli, tmp_path):
    write(tmp_path, {"wds/set-train-0.tar": samples(0, 20) + samples(20, 40)})
    result = cli("rackrun convert index wds")
    assert result.code == 65 and "after its end marker" in result.err, result
    assert not (tmp_path / "wds" / "dataset.json").exists()


def test_of_a_member_that_an_archive_has_twice_the_last_is_stored(cli, tmp_path):
    members = [*pictures("a").items(), ("a/cat/003.jpg", drawn("corrected"))]
    (tmp_path / "set.tar").write_bytes(tar(members))
    result = cli("rackrun convert folder set.tar out")
    assert result.code == 0 and count(tmp_path / "out") == 24, result
    assert drawn("corrected") in dict(stored(tmp_path / "out")).values()
    assert "replaced by a later member" in result.said


# Folders


def test_thumbnails_of_a_nas_are_no_images_of_the_set(cli, tmp_path):
    thumbnails = {
        f"photo/{kind}/@eaDir/{n:03d}.jpg/SYNOFILE_THUMB_{size}.jpg": drawn(f"{kind}{n}{size}")
        for kind, n in each_kind(12)
        for size in ("M", "XL")
    }
    write(tmp_path, {**pictures("photo"), **thumbnails, "photo/#recycle/cat/1.jpg": drawn("r")})
    result = cli("rackrun convert folder photo out")
    assert result.code == 0, result
    assert (count(tmp_path / "out"), classes(tmp_path / "out")) == (24, ["cat", "dog"])


def test_folders_of_the_file_system_are_no_classes(cli, tmp_path):
    system = ["lost+found/", "$RECYCLE.BIN/S-1-5-21/", "System Volume Information/"]
    write(tmp_path, {**pictures("disk"), **{f"disk/{name}": "" for name in system}})
    assert cli("rackrun convert folder disk out").code == 0
    assert classes(tmp_path / "out") == ["cat", "dog"]


@pytest.mark.parametrize(
    "folders",
    [
        ("training_set/training_set", "test_set/test_set"),
        ("seg_train/seg_train", "seg_test/seg_test"),
    ],
    ids=str,
)
def test_splits_are_not_taken_for_classes(folders, cli, tmp_path):
    for number, folder in enumerate(folders):
        files = {
            f"{folder}/{kind}/{number}{n}.jpg": drawn(f"{folder}{kind}{n}")
            for kind, n in each_kind(8)
        }
        write(tmp_path / "set", files)
    result = cli("rackrun convert folder set out")
    assert result.code == 65 and "look like splits" in result.err, result
    assert f"ln -s {tmp_path / 'set' / folders[0]} SET/train" in result.err


def test_a_set_of_one_class_of_several_is_converted(cli, tmp_path):
    write(tmp_path, {**pictures("new"), "names.txt": "bird\ncat\ndog\n"})
    shutil.rmtree(tmp_path / "new" / "cat")
    result = cli("rackrun convert folder new out --classes names.txt --val-percent 0")
    assert result.code == 0, result
    assert (count(tmp_path / "out"), classes(tmp_path / "out")) == (12, ["bird", "cat", "dog"])


def test_classes_in_a_file_are_those_of_folders_that_macos_named(cli, tmp_path):
    kinds = ("Bären", "Hunde")
    for kind in kinds:
        files = {f"{n}.jpg": drawn(f"{kind}{n}") for n in range(8)}
        write(tmp_path / "set" / unicodedata.normalize("NFD", kind), files)
    write(tmp_path, {"names.txt": "Hunde\nBären\n"})
    assert cli("rackrun convert folder set out --classes names.txt").code == 0
    assert (count(tmp_path / "out"), classes(tmp_path / "out")) == (16, ["Hunde", "Bären"])


def test_a_folder_of_classes_that_is_no_split_is_named(cli, tmp_path):
    files = {
        f"food/{split}/{kind}/{n}.jpg": drawn(f"{split}{kind}{n}")
        for split in ("training", "validation", "evaluation")
        for kind, n in each_kind(6)
    }
    write(tmp_path, files)
    result = cli("rackrun convert folder food out")
    assert result.code == 0 and "evaluation has class folders, too" in result.err, result
    assert count(tmp_path / "out") == 24


def test_masks_beside_images_are_named(cli, tmp_path):
    masks = {
        name.replace(".jpg", "_mask_1.png"): drawn(name, format="PNG", mode="1")
        for name in pictures()
    }
    write(tmp_path, {**pictures(), **masks})
    result = cli("rackrun convert folder set out")
    assert result.code == 0 and "24 images named like masks" in result.err, result
    assert cli("rackrun convert folder set plain --exclude '*_mask_*'").code == 0
    assert count(tmp_path / "plain") == 24


def test_captions_are_not_taken_for_classes(cli, tmp_path):
    members = [
        member
        for number in range(30)
        for member in (
            (f"{number:09d}.jpg", drawn(number)),
            (f"{number:09d}.txt", f"a photo of a dog, number {number}, on a beach".encode()),
        )
    ]
    write(tmp_path, {"cc/cc-train-0.tar": tar(members)})
    result = cli("rackrun convert index cc")
    assert result.code == 65 and "--allow unique-labels" in result.err, result
    assert "a photo of a dog" in result.err


def test_a_folder_that_is_a_link_is_indexed(cli, tmp_path):
    write(tmp_path, {"real/x-train-0.tar": samples(0, 9), "real/x-val-0.tar": samples(9, 18)})
    (tmp_path / "link").symlink_to("real")
    result = cli("rackrun convert index link")
    assert result.code == 0, result
    assert count(tmp_path / "link") == 18


# Images


def test_a_whole_png_with_a_megabyte_of_text_or_profile_is_decoded_as_stored(cli, tmp_path):
    text = PngImagePlugin.PngInfo()
    history = "".join(f"<rdf:li>{zlib.crc32(str(n).encode())}</rdf:li>" for n in range(90_000))
    text.add_itxt("XML:com.adobe.xmp", history, zip=True)
    write(
        tmp_path,
        {
            **pictures(),
            "set/cat/history.png": drawn("text", format="PNG", pnginfo=text),
            "set/cat/profile.png": drawn("icc", format="PNG", icc_profile=os.urandom(1_500_000)),
        },
    )
    assert cli("rackrun convert folder set out").code == 0
    assert count(tmp_path / "out") == 26
    trained = cli("rackrun local --plain catdog --data out --epochs 1 --image-size 32 --device cpu")
    assert trained.code == 0, trained


def test_pngs_whose_pixels_are_not_all_there_are_left_out_by_name(cli, tmp_path):
    pixels = b"".join(b"\0" + os.urandom(48 * 3) for _ in range(36))
    packed = zlib.compress(pixels)
    write(
        tmp_path,
        {
            **pictures(count=120),
            "set/cat/half.png": png(packed[: len(packed) // 2], (48, 36)),
            "set/cat/xcode.png": png(packed[2:-4], (48, 36), chunk(b"CgBI", b"\x50\0\x20\2")),
        },
    )
    result = cli("rackrun convert folder set out")
    assert result.code == 0 and count(tmp_path / "out") == 240, result
    report = (tmp_path / "out" / "report.json").read_text()
    assert "cat/half.png" in report and "xcode.png" in report


@pytest.mark.parametrize("form", ["JPEG", "WEBP", "PNG", "TIFF", "AVIF"])
def test_an_image_that_its_exif_turns_is_stored_upright(form, cli, tmp_path):
    suffix = {"JPEG": "jpg", "TIFF": "tif"}.get(form, form.lower())
    write(
        tmp_path,
        {
            f"set/{kind}/{n}.{suffix}": lying(form, exif(), ord(kind[0]) + n)
            for kind, n in each_kind(3)
        },
    )
    assert cli("rackrun convert folder set out --val-percent 0").code == 0
    assert [key for key, data in stored(tmp_path / "out") if not upright(data)] == []


def test_an_orientation_written_as_a_long_number_is_followed(cli, tmp_path):
    header = struct.pack(">LHHHLLL", 8, 1, 274, 4, 1, 6, 0)
    data = {
        f"set/{kind}/{n}.jpg": lying("JPEG", b"Exif\0\0MM\0*" + header, ord(kind[0]) + n)
        for kind, n in each_kind(3)
    }
    write(tmp_path, data)
    assert cli("rackrun convert folder set out --val-percent 0").code == 0
    assert [key for key, data in stored(tmp_path / "out") if not upright(data)] == []


def test_images_are_known_by_their_bytes_rather_than_their_names(cli, tmp_path):
    lies = {"a.jpg": "AVIF", "b.png": "TIFF", "c.tif": "PNG", "d.avif": "WEBP", "e.ppm": "PPM"}
    write(
        tmp_path,
        {
            **pictures(),
            **{f"set/cat/{name}": drawn(name, format=form) for name, form in lies.items()},
        },
    )
    assert cli("rackrun convert folder set out").code == 0
    assert count(tmp_path / "out") == 24 + len(lies)


def test_the_suffixes_that_browsers_give_to_jpegs_are_read(cli, tmp_path):
    more = {
        f"set/dog/w{n}{suffix}": drawn(f"{n}{suffix}")
        for n in range(4)
        for suffix in (".jfif", ".pjpeg", ".pjp", ".mpo")
    }
    write(tmp_path, {**pictures(), **more})
    assert cli("rackrun convert folder set out").code == 0
    assert count(tmp_path / "out") == 40


def test_names_that_downloads_left_odd_are_those_of_images(cli, tmp_path):
    odd = ("plain", "a.jpg?w=300", "b.jpg_large", "c.png.1", "d.JPG")
    write(
        tmp_path,
        {
            **{f"set/{kind}/{name}": drawn(f"{kind}{name}") for kind in KINDS for name in odd},
            **{f"set/cat/a.jpg.{other}": "{}" for other in ("json", "xmp", "txt")},
        },
    )
    result = cli("rackrun convert folder set out --val-percent 0")
    assert result.code == 0 and "not an image, by their names (" in result.out, result
    assert count(tmp_path / "out") == 2 * len(odd)


def test_pointers_of_git_lfs_are_named(cli, tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 9\n"
    write(tmp_path, {f"set/{kind}/{n}.jpg": pointer.format(n) for kind, n in each_kind(12)})
    result = cli("rackrun convert folder set out")
    assert result.code == 65 and "git lfs pull" in result.err, result


def test_a_photograph_of_108_megapixels_can_be_stored_small(cli, tmp_path):
    large = io.BytesIO()
    Image.new("RGB", (12_000, 9_000), (90, 120, 60)).save(large, "JPEG", quality=80)
    write(tmp_path, {**pictures(), "set/cat/phone.jpg": large.getvalue()})
    left_out = cli("rackrun convert folder set out")
    assert "--short-side" in left_out.said + (tmp_path / "out" / "report.json").read_text()
    assert cli("rackrun convert folder set small --short-side 256").code == 0
    assert count(tmp_path / "small") == 25


def test_a_group_that_is_most_of_the_images_is_not_held_out(cli, tmp_path):
    """Whichever group the draw begins with: one long video would be nearly all of the validation
    set."""
    for name in "ab":
        sizes = {f"long-{name}": 60, **{f"short-{n}": 2 for n in range(10)}}
        images = {
            f"{name}/{kind}/{video}/{n}.jpg": drawn(f"{kind}{video}{n}")
            for kind in KINDS
            for video, count in sizes.items()
            for n in range(count // 2)
        }
        write(tmp_path, images)
        result = cli(f"rackrun convert folder {name} out-{name} --group-level 1 --workers 1")
        assert result.code == 0, result
        held_out = open_source(f"{tmp_path}/out-{name}").manifest.split("val").samples
        assert 0 < held_out <= 1.5 * 8


def test_the_shards_do_not_depend_on_the_number_of_workers(cli, tmp_path):
    # A broken progressive JPEG passed once a sound one with its header had come before.
    sound = drawn("progressive", size=(400, 300), progressive=True)
    broken = sound[: len(sound) * 2 // 3] + os.urandom(len(sound) // 3)
    files = {
        f"set/{kind}/{n}.jpg": drawn(f"{kind}{n}", size=(400, 300), progressive=True)
        for kind, n in each_kind(60)
    }
    write(tmp_path, {**files, "set/cat/broken.jpg": broken})
    stored_by = {}
    for workers in (1, 2, 3):
        result = cli(f"rackrun convert folder set out{workers} --workers {workers}")
        assert result.code == 0, result
        stored_by[workers] = dict(stored(tmp_path / f"out{workers}"))
    assert stored_by[1] == stored_by[2] == stored_by[3]


def test_the_classes_and_splits_that_were_found_are_said(cli, tmp_path):
    write(tmp_path, {f"set/{name}": data for name, data in pictures().items()})
    write(tmp_path, {f"set/examples/{n}.jpg": drawn(100 + n) for n in range(10)})
    result = cli("rackrun convert folder set out")
    assert result.code == 0, result
    assert "2 classes: examples, set; images: train " in result.err
    assert "set/set: the images of its 2 folders, cat, dog, are one class" in result.err


# Tables


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("\ufeffpath;label\r\n", "set/{kind}/{n:03d}.jpg;{kind}\r\n"),
        ("path\tlabel\n", "set/{kind}/{n:03d}.jpg\t{kind}\n"),
        ("path, label\n", "set/{kind}/{n:03d}.jpg, {kind}\n"),
        ("path,label\n", "set\\{kind}\\{n:03d}.jpg,{kind}\n"),
        ("path,label\n", "set/{kind}/{n:03d},{kind}\n"),
    ],
    ids=["semicolons", "tabs", "blanks", "backslashes", "no suffix"],
)
def test_tables_are_read_as_spreadsheets_and_kaggle_write_them(header, row, cli, tmp_path):
    rows = "".join(row.format(kind=kind, n=n) for kind, n in each_kind(12))
    write(tmp_path, {**pictures(), "labels.csv": header + rows})
    result = cli("rackrun convert csv labels.csv out")
    assert result.code == 0, result
    assert (count(tmp_path / "out"), classes(tmp_path / "out")) == (24, ["cat", "dog"])


def test_rows_of_a_table_are_images_whatever_their_files_are_called(cli, tmp_path):
    files = {f"set/{n}{suffix}": drawn(n) for n in range(9) for suffix in ("", ".orig", ".dat")}
    rows = "".join(f"{name},{('pug', 'boxer')[n % 2]}\n" for n, name in enumerate(files))
    write(tmp_path, {**files, "labels.csv": f"path,label\n{rows}"})
    result = cli("rackrun convert csv labels.csv out --allow leaks")
    assert result.code == 0, result
    assert count(tmp_path / "out") == 27


def test_a_column_of_splits_by_another_name_is_named(cli, tmp_path):
    rows = "".join(
        f"set/{kind}/{n:03d}.jpg,{kind},{'val' if n < 3 else 'train'}\n"
        for kind, n in each_kind(12)
    )
    write(tmp_path, {**pictures(), "labels.csv": f"path,label,subset\n{rows}"})
    result = cli("rackrun convert csv labels.csv out")
    assert result.code == 0 and "--split-column subset" in result.err, result


def test_labels_that_pandas_wrote_as_floats_into_tars_are_numbers(cli, tmp_path):
    members = [
        member
        for n in range(12)
        for member in (
            (f"{n:03d}.jpg", drawn(n)),
            (f"{n:03d}.json", json.dumps({"label": float(n % 2)}).encode()),
        )
    ]
    write(tmp_path, {"wds/wds-train-0.tar": tar(members)})
    assert cli("rackrun convert index wds").code == 0
    assert classes(tmp_path / "wds") == ["0", "1"]


def test_parquet_of_bytes_is_read_although_nothing_calls_them_images(cli, tmp_path):
    images = [{"bytes": drawn(n), "path": None} for n in range(12)]
    table = pyarrow.table({"photo": images, "label": [n % 2 for n in range(12)]})
    (tmp_path / "set").mkdir()
    parquet.write_table(table, tmp_path / "set" / "train-00000.parquet")
    result = cli("rackrun convert hf set out --label-column label")
    assert result.code == 0, result
    assert (count(tmp_path / "out"), classes(tmp_path / "out")) == (12, ["0", "1"])


def test_a_doctor_csv_that_excel_saved_with_semicolons_is_read(cli, tmp_path):
    header = "split;shard;key;class;problem;action;new_class;score;reason"
    write(
        tmp_path,
        {**pictures(), "doctor.csv": f"\ufeff{header}\r\ntrain;;cat_001;cat;copy;drop;;0,98;x\r\n"},
    )
    assert cli("rackrun convert folder set out").code == 0
    result = cli("rackrun convert drop out doctor.csv")
    assert result.code == 0, result
    assert cli("rackrun convert verify out").code == 0


def test_ids_without_a_suffix_are_found(cli, tmp_path):
    files = {f"train/{n:03d}.jpg": drawn(n) for n in range(24)}
    rows = "".join(f"{n:03d},{('pug', 'boxer')[n % 2]}\n" for n in range(24))
    write(tmp_path, {**files, "labels.csv": f"id,breed\n{rows}"})
    line = "rackrun convert csv labels.csv out --root train --path-column id --label-column breed"
    result = cli(line)
    assert result.code == 0 and ".jpg is added" in result.err, result
    assert (count(tmp_path / "out"), classes(tmp_path / "out")) == (24, ["boxer", "pug"])


def test_labels_that_pandas_wrote_as_floats_keep_their_order(cli, tmp_path):
    files = {f"i/{n:03d}.jpg": drawn(n) for n in range(48)}
    rows = "".join(f"i/{n:03d}.jpg,{n % 12}.0\n" for n in range(48))
    write(tmp_path, {**files, "labels.csv": f"path,label\n{rows}"})
    result = cli("rackrun convert csv labels.csv out")
    assert result.code == 0, result
    assert [float(name) for name in classes(tmp_path / "out")] == [float(n) for n in range(12)]


# Addresses


def test_a_source_that_goes_away_is_named(cli, tmp_path):
    write(tmp_path, pictures())
    assert cli("rackrun convert folder set out").code == 0
    shutil.rmtree(tmp_path / "out")
    result = cli("rackrun local --plain catdog --data out --epochs 1")
    assert result.code == 66 or result.code == 64, result
    assert "out" in result.err
