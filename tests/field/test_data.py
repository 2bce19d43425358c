"""What people met when they packed images, made after public reports; each test is a kind."""

import io
import os
import shutil
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
from tests.lab.run import Content, write
from tests.lab.sources import link

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


# Sources of all kinds, and what a conversion makes of them

PICTURES = pictures()
FOLDER = "rackrun convert folder set out"
CSV = "rackrun convert csv labels.csv out"


@dataclass(frozen=True)
class Met:
    """A source as people met it: the line that converts it, and what that has to come to."""

    name: str
    line: str
    files: Mapping[str, Content]
    images: int = 24
    kinds: tuple[str, ...] = KINDS
    """In the order of their numbers."""
    says: str = ""
    """Part of what is printed."""
    out: str = "out"

    def __str__(self) -> str:
        return self.name


def zip_of(name: bytes, extra: bytes = b"", system: int = 0) -> bytes:
    """Return a zip of four sheep and an image of this name, as a system wrote it."""
    info = zipfile.ZipInfo("x" * len(name))
    info.extra, info.create_system = extra, system
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w") as archive:
        archive.writestr(info, tiny_gif(99))
        for number in range(4):
            archive.writestr(f"sheep/{number}.gif", tiny_gif(number))
    return stored.getvalue().replace(b"x" * len(name), name)


def guessed(*kinds: bytes) -> bytes:
    """Return a zip of eight images of each kind, whose names say no encoding."""
    names = [b"%s/%d.gif" % (kind, number) for kind in kinds for number in range(8)]
    members = [(b"d/" + name, tiny_gif(number)) for number, name in enumerate(names)]
    return zip_without_zip64(members, made_by=0x14)


def in_parquet(path: Path) -> None:
    images = [{"bytes": drawn(n), "path": None} for n in range(12)]
    parquet.write_table(pyarrow.table({"photo": images, "label": [n % 2 for n in range(12)]}), path)


def labeled(row: str, *head: str) -> dict[str, Content]:
    """Return pictures, and a table with a row for each."""
    rows = "".join(row.format(kind=kind, n=n) for kind, n in each_kind(12))
    return {**PICTURES, "labels.csv": "".join(head) + rows}


def of_mac(name: str) -> str:
    return unicodedata.normalize("NFD", name)


PROPER = "бär/1.gif".encode()
UNICODE_PATH = struct.pack("<HHBL", 0x7075, 5 + len(PROPER), 1, zlib.crc32(b"b\x84r/1.gif"))
LITTER = {
    **{
        f"set/{kind}/@eaDir/{n:03d}.jpg/SYNOFILE_THUMB_{size}.jpg": drawn(f"{kind}{n}{size}")
        for kind, n in each_kind(12)
        for size in ("M", "XL")
    },
    "set/#recycle/cat/1.jpg": drawn("r"),
    **dict.fromkeys(("set/lost+found/", "set/$RECYCLE.BIN/S-1-5-21/"), ""),
}
MASKS = {
    name.replace(".jpg", "_mask_1.png"): drawn(name, format="PNG", mode="1") for name in PICTURES
}
LIES = {"a.jpg": "AVIF", "b.png": "TIFF", "c.tif": "PNG", "d.avif": "WEBP", "e.ppm": "PPM"}
BROWSERS = (".jfif", ".pjpeg", ".pjp", ".mpo")
ODD = ("plain", "a.jpg?w=300", "b.jpg_large", "c.png.1", "d.JPG")
PETS = [(kind, number) for kind in ("Bären", "Füchse") for number in range(12)]
BREEDS = [f"{n:03d},{('pug', 'boxer')[n % 2]}\n" for n in range(24)]
MET = [
    # Archives.
    *(
        Met(
            f"a tar whose names begin with {before}", "rackrun convert folder set.tar out",
            {"set.tar": tar({before + name[4:]: data for name, data in PICTURES.items()})},
        )
        for before in ("./", "./set/", "/data/")
    ),
    *(
        Met(
            name, "rackrun convert folder a.zip out --val-percent 0", {"a.zip": zip_of(*entry)}, 5,
            tuple(sorted([kind, "sheep"])),
        )
        for name, entry, kind in (
            ("UTF-8 without its flag", ("日本猫/1.gif".encode(), b"", 3), "日本猫"),
            ("code page 437", (b"b\x84r/1.gif",), "bär"),
            ("Info-ZIP", (b"b\x84r/1.gif", UNICODE_PATH + PROPER), "бär"),
            ("the path of another name", (b"other/1.gif", UNICODE_PATH + PROPER), "other"),
            ("backslashes", (b"cow\\1.gif",), "cow"),
        )
    ),
    Met(
        "names that Finder wrote", "rackrun convert folder a.zip out",
        {"a.zip": guessed(*(of_mac(kind).encode() for kind in ("Bären", "Füchse")))}, 16,
        (of_mac("Bären"), of_mac("Füchse")),
    ),
    Met(
        "names in a code page", "rackrun convert folder a.zip out",
        {"a.zip": guessed("犬".encode("shift-jis"), "猫".encode("shift-jis"))}, 16,
        ("îó", "öL"), says="16 names in an unknown code page",
    ),
    # Folders.
    Met("litter of systems", FOLDER, {**PICTURES, **LITTER}),
    Met(
        "one class of several", f"{FOLDER} --classes names.txt --val-percent 0",
        {
            "names.txt": "bird\ncat\ndog\n",
            **{name: data for name, data in PICTURES.items() if "dog" in name},
        },
        12, ("bird", "cat", "dog"),
    ),
    Met(
        "folders of a Mac", f"{FOLDER} --classes names.txt",
        {
            "names.txt": "Hunde\nBären\n",
            **{
                f"set/{of_mac(kind)}/{n}.jpg": drawn(f"{kind}{n}")
                for kind in ("Bären", "Hunde")
                for n in range(8)
            },
        },
        16, ("Hunde", "Bären"),
    ),
    Met(
        "classes in a folder that is no split", FOLDER,
        {
            f"set/{split}/{kind}/{n}.jpg": drawn(f"{split}{kind}{n}")
            for split in ("training", "validation", "evaluation")
            for kind, n in each_kind(6)
        },
        says="evaluation has class folders, too",
    ),
    Met("a time in the name of the shards", f"{FOLDER}-12:30", PICTURES, out="out-12:30"),
    Met(
        "a fraction for a percentage", f"{FOLDER} --val-percent 0.2", PICTURES,
        says="for a fraction of 0.2, type --val-percent 20",
    ),
    Met(
        "one of two folders for the validation", f"{FOLDER} --exclude valid",
        {
            f"set/{split}/{kind}/{n}.jpg": drawn(f"{split}{kind}{n}")
            for split in ("train", "val", "valid")
            for kind, n in each_kind(6)
        },
    ),
    Met("masks", FOLDER, {**PICTURES, **MASKS}, 48, says="24 images named like masks"),
    Met("masks that are excluded", f"{FOLDER} --exclude '*_mask_*'", {**PICTURES, **MASKS}),
    Met(
        "two levels", FOLDER,
        {
            **{f"set/{name}": data for name, data in PICTURES.items()},
            **{f"set/examples/{n}.jpg": drawn(100 + n) for n in range(10)},
        },
        34, ("examples", "set"),
        says="set/set: the images of its 2 folders, cat, dog, are one class",
    ),
    # Names of images.
    Met(
        "images whose names lie", FOLDER,
        {**PICTURES, **{f"set/cat/{n}": drawn(n, format=form) for n, form in LIES.items()}},
        24 + len(LIES),
    ),
    Met(
        "suffixes of browsers", FOLDER,
        {**PICTURES, **{f"set/dog/w{each}": drawn(each) for each in BROWSERS}},
        24 + len(BROWSERS),
    ),
    Met(
        "names of downloads", f"{FOLDER} --val-percent 0",
        {
            **{f"set/{kind}/{name}": drawn(f"{kind}{name}") for kind in KINDS for name in ODD},
            **{f"set/cat/a.jpg.{other}": "{}" for other in ("json", "xmp", "txt")},
        },
        2 * len(ODD), says="not an image, by their names (",
    ),
    # Tables.
    Met("semicolons", CSV, labeled("set/{kind}/{n:03d}.jpg;{kind}\r\n", "\ufeffpath;label\r\n")),
    Met("tabs", CSV, labeled("set/{kind}/{n:03d}.jpg\t{kind}\n", "path\tlabel\n")),
    Met("blanks", CSV, labeled("set/{kind}/{n:03d}.jpg, {kind}\n", "path, label\n")),
    Met("backslashes", CSV, labeled("set\\{kind}\\{n:03d}.jpg,{kind}\n", "path,label\n")),
    Met("no suffix", CSV, labeled("set/{kind}/{n:03d},{kind}\n", "path,label\n")),
    Met(
        "names that a Mac took apart", CSV,
        {
            **{f"set/{of_mac(kind)}/{n}.jpg": drawn(f"{kind}{n}") for kind, n in PETS},
            "labels.csv": "path,label\n" + "".join(f"set/{k}/{n}.jpg,{k}\n" for k, n in PETS),
        },
        kinds=("Bären", "Füchse"),
    ),
    Met(
        "labels that pandas had none of", CSV,
        PICTURES
        | {f"i/{n}.jpg": drawn(n) for n in range(5)}
        | {
            "labels.csv": "path,label\n"
            + "".join(f"set/{kind}/{n:03d}.jpg,{kind}\n" for kind, n in each_kind(12))
            + "".join(f"i/{n}.jpg,nan\n" for n in range(5))
        },
        29, (*KINDS, "nan"), says="5 rows with the label nan",
    ),
    Met(
        "a column of splits by another name", CSV,
        labeled("set/{kind}/{n:03d}.jpg,{kind},train\n", "path,label,subset\n"),
        says="--split-column subset",
    ),
    *(
        Met(
            f"a column {column}", CSV,
            labeled(f"set/{{kind}}/{{n:03d}}.jpg,{{kind}},{cell}\n", f"path,label,{column}\n"),
            says=f"column '{column}' is not used",
        )
        for column, cell in (("is_valid", "True"), ("Usage", "PrivateTest"), ("fold", "{n}"))
    ),
    Met(
        "labels of several others", CSV,
        labeled("set/{kind}/{n:03d}.jpg,{kind}\n", "path,label\n")
        | {"i/both.jpg": drawn("both")}
        | {
            "labels.csv": "path,label\ni/both.jpg,cat|dog\n"
            + "".join(f"set/{kind}/{n:03d}.jpg,{kind}\n" for kind, n in each_kind(12))
        },
        25, ("cat", "cat|dog", "dog"), says="1 label of several others: cat|dog",
    ),
    Met(
        "files of any name", f"{CSV} --allow leaks",
        {
            **{f"set/{n}{suffix}": drawn(n) for n in range(9) for suffix in ("", ".orig", ".dat")},
            "labels.csv": "path,label\n"
            + "".join(
                f"set/{n}{suffix},{'ab'[n % 2]}\n"
                for n in range(9)
                for suffix in ("", ".orig", ".dat")
            ),
        },
        27, ("a", "b"),
    ),
    Met(
        "ids of Kaggle", f"{CSV} --root train --path-column id --label-column breed",
        {
            **{f"train/{n:03d}.jpg": drawn(n) for n in range(24)},
            "labels.csv": "id,breed\n" + "".join(BREEDS),
        },
        kinds=("boxer", "pug"), says=".jpg is added",
    ),
    Met(
        "floats of pandas", CSV,
        {
            **{f"i/{n:03d}.jpg": drawn(n) for n in range(48)},
            "labels.csv": "path,label\n"
            + "".join(f"i/{n:03d}.jpg,{n % 12}.0\n" for n in range(48)),
        },
        48, tuple(str(n) for n in range(12)),
    ),
    Met(
        "bytes in Parquet", "rackrun convert hf set out --label-column label",
        {"set/train-00000.parquet": in_parquet}, 12, ("0", "1"),
    ),
    # Tars of samples.
    Met(
        "floats of pandas in tars", "rackrun convert index wds",
        {
            "wds/wds-train-0.tar": tar(
                [
                    member
                    for n in range(12)
                    for member in (
                        (f"{n:03d}.jpg", drawn(n)),
                        (f"{n:03d}.json", b'{"label": %d.0}' % (n % 2)),
                    )
                ]
            )
        },
        12, ("0", "1"), out="wds",
    ),
    Met(
        "a link to a folder", "rackrun convert index link",
        {"real/x-train-0.tar": samples(0, 9), "real/x-val-0.tar": samples(9, 18),
         "link": link("real")},
        18, ("0", "1"), out="link",
    ),
]  # fmt: skip


@pytest.mark.parametrize("met", MET, ids=str)
def test_a_source_is_converted_as_whoever_packed_it_meant(met, cli, tmp_path):
    write(tmp_path, met.files)
    result = cli(met.line)
    assert result.code == 0 and met.says in result.said, result
    assert (count(tmp_path / met.out), classes(tmp_path / met.out)) == (met.images, [*met.kinds])


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


def test_of_a_member_that_an_archive_has_twice_the_last_is_stored(cli, tmp_path):
    members = [*pictures("a").items(), ("a/cat/003.jpg", drawn("corrected"))]
    (tmp_path / "set.tar").write_bytes(tar(members))
    result = cli("rackrun convert folder set.tar out")
    assert result.code == 0 and count(tmp_path / "out") == 24, result
    assert drawn("corrected") in dict(stored(tmp_path / "out")).values()
    assert "replaced by a later member" in result.said


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


# Addresses


def test_a_source_that_goes_away_is_named(cli, tmp_path):
    write(tmp_path, pictures())
    assert cli("rackrun convert folder set out").code == 0
    shutil.rmtree(tmp_path / "out")
    result = cli("rackrun local --plain catdog --data out --epochs 1")
    assert result.code == 66 or result.code == 64, result
    assert "out" in result.err
