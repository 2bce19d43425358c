"""Refusals of conversions: the words typed, and sources that are no data set."""

import gzip
import io
import math
import stat
import struct
import tarfile
import unicodedata
import zipfile
from collections.abc import Iterable

from tests.lab.data import drawn, kaggle, tar
from tests.lab.refusal import Refusal
from tests.lab.sources import (
    below,
    changed,
    classes,
    fifo,
    link,
    made_by,
    tar_of,
    tarred,
    zipped,
)

FOLDER = "rackrun convert folder photos out"
TWO = classes(2, "a", "b")
PHOTOS = below("photos", TWO)
TRAIN = below("photos/train", classes(10, "a", "b"))
VAL = below("photos/val", {f"{kind}/v.jpg": drawn(f"{kind} v") for kind in "ab"})
VALID = below("photos/valid", {f"{kind}/w.jpg": drawn(f"{kind} w") for kind in "ab"})
PETS = kaggle(6)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 9\n"

# The words typed.
WORDS = [
    Refusal("rackrun convert", 64, "rackrun convert --help"),
    Refusal("./run-local convert", 64, "./run-local convert --help"),
    Refusal("rackrun convert foldr in out", 64, ("foldr", "did you mean folder")),
    Refusal("rackrun convert photos out", 64, "rackrun convert folder photos out", PHOTOS),
    Refusal("rackrun convert --workers 2", 64, "--workers"),
    Refusal("rackrun convert folder photos", 64, "OUT", PHOTOS),
    Refusal("rackrun convert folder", 64, "SOURCE"),
    Refusal("rackrun convert folder photos out more", 64, "more", PHOTOS),
    Refusal("rackrun convert folder photos out --speed 9", 64, "--speed", PHOTOS),
    Refusal("rackrun convert folder photos out --shard 9", 64, "--shards", PHOTOS),
    Refusal("rackrun convert folder photos out --shards many", 64, ("--shards", "many"), PHOTOS),
    Refusal("rackrun convert folder photos out --shards", 64, "--shards", PHOTOS),
    Refusal("rackrun convert imagenet in out --shards -1", 64, "--shards"),
    Refusal(f"{FOLDER} --shards 1000", 64, "1,000 shards", PHOTOS),
    Refusal(f"{FOLDER} --val-percent 100", 64, ("--val-percent", "90"), PHOTOS),
    Refusal(f"{FOLDER} --val-percent 30 --test-percent 70", 64, "--test-percent", PHOTOS),
    Refusal(f"{FOLDER} --task-index 3 --task-count 3", 64, ("--task-index 3", "2"), PHOTOS),
    Refusal(f"{FOLDER} --task-count 3", 64, "--task-index", PHOTOS),
    Refusal(f"{FOLDER} --task-index 0 --task-count 2 --force", 64, "--force", PHOTOS),
    Refusal(f"{FOLDER} --size 0", 64, ("--size 0", "4096"), PHOTOS),
    Refusal(f"{FOLDER} --short-side 5000", 64, ("--short-side 5000", "4096"), PHOTOS),
    Refusal(f"{FOLDER} --quality 100", 64, ("--quality 100", "95"), PHOTOS),
    Refusal(f"{FOLDER} --size 8 --short-side 8", 64, ("--size", "--short-side"), PHOTOS),
    Refusal(f"{FOLDER} --exif hope", 64, "--exif hope", PHOTOS),
    Refusal(f"{FOLDER} --allow copies", 64, ("copies", "leaks"), PHOTOS),
    Refusal(f"{FOLDER} --group-level 1", 64, "--group-level", TRAIN | VAL),
    Refusal(f"{FOLDER} --group-level 1", 64, "a group of its own", PHOTOS),
    Refusal(f"{FOLDER} --classes names", 64, "names", PHOTOS),
    Refusal(
        f"{FOLDER} --classes names.txt", 64, ("names.txt", "'a'", "two at least"),
        PHOTOS | {"names.txt": "b\n"},
    ),
    Refusal("rackrun convert imagenet in out --classes 0", 64, "--classes 0"),
]  # fmt: skip

# No source, or no place for the result.
PLACES = [
    Refusal(FOLDER, 64, "photos"),
    Refusal("rackrun convert catdog nowhere.zip out", 64, "nowhere.zip"),
    Refusal("rackrun convert mnist nowhere out", 64, "nowhere"),
    Refusal("rackrun convert csv nowhere.csv out", 64, "nowhere.csv"),
    Refusal("rackrun convert folder photos photos/out", 64, "photos/out", PHOTOS),
    Refusal("rackrun convert folder photos file/out", 74, "file/out", PHOTOS | {"file": ""}),
    Refusal(FOLDER, 64, "report.json", PHOTOS | {"out/report.json": "mine"}),
    Refusal(f"{FOLDER} --force", 64, "report.json", PHOTOS | {"out/report.json": "mine"}),
    Refusal(FOLDER, 64, "out/other-train-000000.tar", PHOTOS | {"out/other-train-000000.tar": ""}),
    Refusal(FOLDER, 65, "out/.converting/plan", PHOTOS | {"out/.converting/plan": "[[["}),
    Refusal(
        f"{FOLDER} --force", 65, "out/.converting/plan", PHOTOS | {"out/.converting/plan": "[[["},
    ),
]  # fmt: skip

# Folders of classes.
CLASSES = [
    Refusal(FOLDER, 64, "0 class folders", {"photos/": ""}),
    Refusal(FOLDER, 64, "1 class folder", below("photos", classes(2, "only"))),
    Refusal(
        FOLDER, 64, "convert csv photos/train.csv",
        {"photos/train.csv": "path,label\n"} | below("photos/images", {"0.jpg": drawn(0)}),
    ),
    Refusal(
        FOLDER, 64, ("0 class folders", "18 images in it", "convert csv"),
        {f"photos/{kind}.{n}.jpg": drawn(f"{kind}{n}") for kind in "ab" for n in range(9)},
    ),
    Refusal(FOLDER, 65, "photos/b", below("photos", classes(2, "a")) | {"photos/b/notes.txt": "x"}),
    Refusal(FOLDER, 65, "val/c", below("photos/train", TWO) | {"photos/val/c/0.jpg": drawn("c")}),
    Refusal(
        FOLDER, 65, ("val/Gänse", "'Ga\\u0308nse'", "Unicode form"),
        below("photos/train", classes(2, "a", unicodedata.normalize("NFD", "Gänse")))
        | below("photos/val", classes(1, "a", "Gänse")),
    ),
    Refusal(
        FOLDER, 64, ("val, valid are all for the split val", "--exclude valid"),
        TRAIN | VAL | VALID,
    ),
    Refusal(
        FOLDER, 65, ("photos/val/images", "move it away", "convert csv"),
        below("photos/train", TWO) | {"photos/val/images/0.jpg": drawn("v")},
    ),
    Refusal(FOLDER, 64, ("photos/data, a, b", "give that"), below("photos/data", TWO)),
    Refusal(
        FOLDER, 64, "no class folders in train/",
        {f"photos/train/{kind}.{n}.jpg": drawn(f"{kind}{n}") for kind in "ab" for n in range(9)},
    ),
    Refusal(
        "rackrun convert folder all.zip out", 64, "it holds train.zip",
        {"all.zip": zipped({"train.zip": zipped(TWO), "sample.csv": b"id"})},
    ),
    Refusal(
        FOLDER, 65, ("photos/b", "--exclude b"),
        below("photos", classes(2, "a")) | {"photos/b/x.txt": ""},
    ),
    Refusal(FOLDER, 64, "--val-percent 0", below("photos", classes(1, "a", "b"))),
    *(
        Refusal(
            FOLDER, 65, ("look like splits", f"photos/{train} SET/train"),
            below(f"photos/{train}", TWO) | {f"photos/{test}/a/t.jpg": drawn("t")},
        )
        for train, test in (
            ("training_set/training_set", "test_set/test_set"),
            ("seg_train/seg_train", "seg_test/seg_test"),
            ("train_data", "val_data"),
        )
    ),
    Refusal(
        FOLDER, 65, "git lfs pull",
        {f"photos/{name}": POINTER.format(number) for number, name in enumerate(TWO)}, leaves="out",
    ),
    Refusal(FOLDER, 64, ("val", "--val-percent 0"), TRAIN | {"photos/val/a/notes.txt": "x"}),
    Refusal(FOLDER, 64, ("Train", "train"), TRAIN | below("photos/Train", TWO)),
    Refusal(FOLDER, 64, "train", below("photos/val", TWO)),
    Refusal(f"{FOLDER} --test-percent 10", 64, "test", TRAIN | VAL | below("photos/test", TWO)),
    Refusal(f"{FOLDER} --test-percent 10", 64, "testing", PHOTOS),
    Refusal("rackrun convert imagefolder photos out --test-percent 85", 64, "--val-percent", TRAIN),
    Refusal(
        FOLDER, 65, "class b", below("photos", classes(3, "a")) | {"photos/b/0.jpg": "broken"},
        leaves="out",
    ),
    Refusal(
        FOLDER, 65, ("Rose", "rose", "--allow similar-classes"),
        below("photos", classes(3, "Rose", "rose")),
    ),
    Refusal(FOLDER, 65, ("STRASSE", "Straße"), below("photos", classes(3, "STRASSE", "Straße"))),
    Refusal(
        FOLDER, 65, ("Ga\\u0308nse", "G\\xe4nse"),
        below("photos", classes(3, *(unicodedata.normalize(f, "Gänse") for f in ("NFC", "NFD")))),
    ),
    Refusal(
        FOLDER, 65, ("train", "--allow split-names"),
        below("photos", classes(9, "train", "test", "car")),
    ),
]  # fmt: skip

# Links, devices, files that are none.
LINKS = [
    Refusal(FOLDER, 65, "x.jpg", PHOTOS | {"photos/a/x.jpg": fifo}),
    Refusal(FOLDER, 65, "/dev/zero", PHOTOS | {"photos/a/x.jpg": link("/dev/zero")}),
    Refusal(FOLDER, 65, "nowhere", PHOTOS | {"photos/a/x.jpg": link("nowhere")}),
    Refusal(FOLDER, 65, ("x.jpg", "circle"), PHOTOS | {"photos/a/x.jpg": link("..")}),
]  # fmt: skip

# Copies of images where they spoil a measurement, and more damage than a set should have.
LEAK = TRAIN | below("photos/val", {"a/v.jpg": drawn("v"), "b/leak.jpg": TWO["b/0.jpg"]})
SPOILT = zipped(kaggle(31) | {f"train/cat.{n}.jpg": b"broken" for n in range(11)})
CONTENTS = [
    Refusal(
        FOLDER, 65, ("val/b/leak.jpg", "train/b/0.jpg", "--allow leaks", "--force"), LEAK,
        leaves="out",
    ),
    Refusal(
        f"{FOLDER} --size 16", 65, "--allow leaks",  # of the same pixels, and other bytes
        below(
            "photos",
            {f"{kind}/{n}.jpg": drawn(kind) + b"%d" % n for kind in "ab" for n in range(9)},
        ),
        leaves="out",
    ),
    Refusal(
        FOLDER, 64, "no class has two different images",
        below("photos", {f"{kind}/{n}.jpg": drawn(kind) for kind in "ab" for n in range(9)}),
        shows="18 images with exact copies",
    ),
    Refusal(
        f"{FOLDER} --task-count 2 --task-index 1", 65, "--allow leaks",
        LEAK
        | {"out": made_by(f"{FOLDER} --task-count 2 --task-index 0", name="out", **LEAK)},
        leaves="out",
    ),
    Refusal(
        "rackrun convert catdog train.zip out --shards 20", 65, "--shards",
        {"train.zip": zipped(kaggle(2) | {f"train/cat.9{n}.jpg": b"broken" for n in range(20)})},
        leaves="out",
    ),
    Refusal(
        "rackrun convert catdog train.zip out", 65, ("11 of 62", "--allow-left-out 11"),
        {"train.zip": SPOILT}, leaves="out",
    ),
    Refusal(
        "rackrun convert catdog train.zip out --allow-left-out 10", 65, "--allow-left-out 11",
        {"train.zip": SPOILT}, leaves="out",
    ),
]  # fmt: skip

# A folder that is finished, or damaged.
DATA = {"out": made_by("rackrun convert folder photos out --shards 1", name="out", **PHOTOS)}
FINISHED = [
    Refusal(f"{FOLDER} --shards 2", 64, ("out", "--force"), PHOTOS | DATA),
    Refusal(
        FOLDER, 65, "dataset.json",
        PHOTOS
        | DATA
        | {"out/dataset.json": changed(lambda data: data.replace(b"photos", b"phutos"))},
    ),
    Refusal(
        f"{FOLDER} --force", 65, "dataset.json",
        PHOTOS
        | DATA
        | {"out/dataset.json": changed(lambda data: data.replace(b"photos", b"phutos"))},
    ),
]  # fmt: skip

# Archives of class folders.
TAR = tar(TWO)
SECOND = tar({"a/x.jpg": drawn("x")})
with tarfile.open(fileobj=io.BytesIO(TAR)) as opened:
    AT = opened.getmembers()[2].offset
TARS = [
    *(
        Refusal("rackrun convert folder set.tar out", 65, names, {"set.tar": data})
        for names, data in (
            (("set.tar", "--ignore-zeros"), TAR + SECOND),
            ("set.tar", TAR[:AT] + bytes(512) + TAR[AT + 512 :]),
            ("set.tar", TAR[: AT + 600]),
            (("a/1.jpg", "--hard-dereference"), tar_of("a/1.jpg", tarfile.LNKTYPE, "a/0.jpg")),
            ("a/1.jpg", tar_of("a/1.jpg", tarfile.SYMTYPE, "/etc/passwd")),
        )
    ),
    *(
        Refusal(f"rackrun convert folder {name} out", 65, (name, says), {name: data}, shows=name)
        for name, says, data in (
            ("set.tgz", "damaged", gzip.compress(TAR)[:-20]),
            ("set.tgz", "inflate", gzip.compress(bytes(9 << 20))),
            ("set.gz", "no tar", gzip.compress(b"path,label\n" * 99)),
        )
    ),
    Refusal("rackrun convert folder set.tzst out", 64, "unzstd", {"set.tzst": b"\x28\xb5\x2f\xfd"}),
    Refusal("rackrun convert folder set.rar out", 64, "set.rar", {"set.rar": "Rar!"}),
]

ZIP = zipped({"a.jpg": bytes(1000), "b.jpg": bytes(1000)})
ENTRY = ZIP.rfind(b"PK\1\2")


def patched(at: int, data: bytes) -> bytes:
    """Return the zip with other bytes at this place."""
    return ZIP[:at] + data + ZIP[at + len(data) :]


def zip_with_a_link() -> bytes:
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w") as archive:
        member = zipfile.ZipInfo("cat.0.jpg")
        member.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(member, "/etc/passwd")
    return stored.getvalue()


ZIPS = [
    Refusal("rackrun convert catdog train.zip out", 65, names, {"train.zip": data})
    for names, data in (
        ("train.zip", b""),
        ("train.zip", b"<html>Sign in to Kaggle</html>"),
        (("train.zip", "cut off"), zipped(PETS)[:-2000]),
        ("overlap", patched(ENTRY + 42, bytes(4))),
        ("b.jpg is encrypted", patched(ENTRY + 8, b"\1")),
        ("Deflate64", patched(ENTRY + 10, b"\x09")),
        ("cat.0.jpg", zip_with_a_link()),
    )
]

ZIPS += [
    Refusal(
        "rackrun convert catdog train.zip out", 65, ("train.zip", "inflate"),
        {"train.zip": zipped({"train.zip": bytes(8 << 20)}, zipfile.ZIP_DEFLATED)},
        shows="reading the train.zip inside it",
    ),
]  # fmt: skip

# Cats and dogs.
PET_SETS = [
    Refusal("rackrun convert catdog a.zip out", 65, names, {"a.zip": zipped(files)})
    for names, files in (
        ("train.zip", {"test1/1.jpg": drawn(1)}),
        ("dog", {"train/cat.0.jpg": drawn(1)}),
        ("dog/cat.1.jpg", {"dog/cat.1.jpg": drawn(1)}),
        ("cat_00000", PETS | {"more/cat.0.jpg": b"x"}),
        ("cat_00000", PETS | {"train/cat.00.jpg": b"x"}),
    )
]

# Tables of paths and labels.
GOOD_ROWS = "img/0.jpg,a,\nimg/1.jpg,b,\n"
IMAGES = {f"set/img/{n}.jpg": drawn(n) for n in range(12)}
OUTSIDE = {"secret.jpg": drawn("secret"), "set/link.jpg": link("../secret.jpg")}


def labeled(labels: Iterable[str]) -> str:
    """Return a table of images with these labels."""
    return "path,label\n" + "".join(f"img/{n}.jpg,{label}\n" for n, label in enumerate(labels))


TABLES = [
    Refusal(
        "rackrun convert csv set/t.csv out", 65, ("--root", "set/img"),
        IMAGES | {"set/t.csv": "path,label\n0.jpg,a\n1.jpg,b\n"},
    ),
    *(
        Refusal(
            "rackrun convert csv set/t.csv out", 65, ("line 4", *names),
            IMAGES | OUTSIDE | {"set/t.csv": f"path,label,split\n{GOOD_ROWS}{row}\n"},
        )
        for names, row in (
            (("../secret.jpg", "--root"), "../secret.jpg,a,"),
            (("/etc/passwd",), "/etc/passwd,a,"),
            (("/kaggle/2.jpg", "no such file", "below --root"), "/kaggle/2.jpg,a,"),
            (("link.jpg",), "link.jpg,a,"),
            (("img/99.jpg", "--allow-left-out 1"), "img/99.jpg,a,"),
            (("no label",), "img/2.jpg,a\x1b[2J,"),
            (("'holdout'",), "img/2.jpg,a,holdout"),
        )
    ),
    Refusal(
        "rackrun convert csv set/t.csv out", 64, ("line 3", "old", "quote"),
        IMAGES | {"set/t.csv": "path,label\nimg/0.jpg,a\nimg/1.jpg,b, old\n"},
    ),
    Refusal(
        "rackrun convert csv set/t.csv out", 64, "two columns are called 'label'",
        IMAGES | {"set/t.csv": "path,label,label\nimg/0.jpg,a,1\nimg/1.jpg,b,2\n"},
    ),
    Refusal(
        f"{FOLDER} --classes names.txt", 64, ("names.txt", "a line is empty"),
        PHOTOS | {"names.txt": "a\n\nb\n"},
    ),
    *(
        Refusal(
            "rackrun convert csv set/t.csv out", 65, names,
            IMAGES | {"set/t.csv": f"path,label,split\n{GOOD_ROWS}{row}\n"},
        )
        for names, row in (
            (("img/0.jpg", "twice"), "img/../img/0.jpg,a,"),
            (("t.csv", "split"), "img/2.jpg,a,train"),
        )
    ),
    *(
        Refusal("rackrun convert csv set/t.csv out", 64, names, IMAGES | {"set/t.csv": data})
        for names, data in (
            (("'path'", "file, label"), "file,label\na,b\n"),
            (("t.csv", "UTF-8"), b"path,label\n\xff,b\n"),
            (("t.csv", "path,label"), "img/0.jpg,a\nimg/1.jpg,b\n"),
            (("t.csv", "UTF-8"), "path,label\na,b\n".encode("utf-16")),
        )
    ),
    Refusal(
        "rackrun convert csv set/t.csv out", 64, ("no column 'path'", "NV, BCC", "per class"),
        IMAGES | {"set/t.csv": "image,NV,BCC\nimg/0.jpg,1.0,0.0\nimg/1.jpg,0.0,1.0\n"},
    ),
    *(
        Refusal(f"rackrun convert csv {table} out", 64, says, {table: "PK"})
        for table, says in (("t.csv.gz", "gunzip -k t.csv.gz"), ("t.xlsx", "CSV UTF-8"))
    ),
    Refusal(
        "rackrun convert csv set/t.csv out --group-column video", 64, "'video'",
        IMAGES | {"set/t.csv": "path,label\n" + GOOD_ROWS.replace(",\n", "\n")},
    ),
    Refusal(
        "rackrun convert csv set/t.csv out", 65, ("12 of 12", "--allow unique-labels"),
        IMAGES | {"set/t.csv": labeled(f"tree {n}" for n in range(12))}, leaves="out",
    ),
    Refusal(
        "rackrun convert csv set/t.csv out", 65, ("'01'", "'1'"),
        IMAGES | {"set/t.csv": labeled(("1", "01", "1", "01"))},
    ),
    Refusal("rackrun convert csv t.parquet out", 64, "t.parquet", {"t.parquet": "PAR1"}),
]  # fmt: skip

AS_PARQUET = """
import pandas
pandas.read_csv("set/t.csv", dtype=str, keep_default_na=False).to_parquet("set/t.parquet")
"""
TABLES += [
    Refusal(
        "rackrun convert csv set/t.parquet out", 65, ("line 3", "../secret.jpg", "--root"),
        {
            "set": made_by(
                "python to_parquet.py", name="set", **IMAGES,
                **{
                    "set/t.csv": f"path,label,split\n{GOOD_ROWS}../secret.jpg,a,\n",
                    "to_parquet.py": AS_PARQUET,
                },
            )
        },
    ),
]  # fmt: skip

# Tars of other programs, which get an index.
IMAGE = drawn("x")
GOOD = [("a.jpg", IMAGE), ("a.cls", b"0")]
INDEX = "rackrun convert index tars"
MEMBERS = [
    Refusal(INDEX, 65, names, {"tars/set-train-0.tar": tarred(*members)}, leaves="report.json")
    for names, members in (
        ("a.cls.gz", [("a.jpg", IMAGE), ("a.cls.gz", gzip.compress(b"0"))]),
        ("../a.jpg", [("../a.jpg", IMAGE), ("../a.cls", b"0")]),
        ("/a.jpg", [("/a.jpg", IMAGE), ("/a.cls", b"0")]),
        ("a: is in it twice", [*GOOD, ("b.cls", b"1"), *GOOD]),
        ("a.cls: is in it twice", [*GOOD, ("a.cls", b"1")]),
        ("a.jpg: a second image", [("a.png", IMAGE), *GOOD]),
        ("a.cls: '-1'", [("a.jpg", IMAGE), ("a.cls", b"-1")]),
        ("a.txt", [("a.jpg", IMAGE), ("a.txt", b"a cat " * 50)]),
        ("a.json", [("a.jpg", IMAGE), ("a.json", b"{")]),
        (("(id)", "--label-field"), [("a.jpg", IMAGE), ("a.json", b'{"id": 1}')]),
        ("a.json: 'True'", [("a.jpg", IMAGE), ("a.json", b'{"label": true}')]),
        (("(0)", "('cat')"), [*GOOD, ("b.jpg", IMAGE), ("b.txt", b"cat")]),
        ("tars", [("a.jpg", IMAGE)]),
        ("tars", [("a.jpg", b""), ("a.cls", b"0")]),
        (
            ("'Rose'", "'rose'", "--allow similar-classes"),
            [("a.jpg", IMAGE), ("a.txt", b"Rose"), ("b.jpg", drawn(2)), ("b.txt", b"rose")],
        ),
    )
]
TRAIN_TAR = {"tars/set-train-0.tar": tarred(*GOOD)}
SAME = [("s.jpg", drawn("same")), ("s.cls", b"1")]


def sample(key: str, label: int) -> list[tuple[str, bytes]]:
    """Return the members of a sample."""
    return [(f"{key}.jpg", drawn(key)), (f"{key}.cls", b"%d" % label)]


TARS_OF = [
    tarred(*(member for n in (0, 1) for member in sample(f"{tar}_{n}", labels[n])))
    for tar, labels in enumerate([(0, 1), (0, 0), (1, 1), (0, 1)])
]
CAPTIONS = [
    member
    for n in range(30)
    for member in ((f"{n:09d}.jpg", drawn(n)), (f"{n:09d}.txt", b"a photo of a dog, number %d" % n))
]
INDEXED = [
    Refusal("rackrun convert index nowhere", 64, "nowhere"),
    Refusal(
        INDEX, 65, ("--allow unique-labels", "a photo of a dog"),
        {"tars/cc-train-0.tar": tarred(*CAPTIONS)}, leaves="report.json",
    ),
    Refusal(
        INDEX, 65, "after its end marker", {"tars/set-train-0.tar": tarred(*GOOD) + tarred(*GOOD)},
        leaves="report.json",
    ),
    Refusal("rackrun convert index tars", 64, "tars", {"tars/": ""}),
    Refusal(INDEX, 64, ("set-0.tar", "--split train"), {"tars/set-0.tar": tarred(*GOOD)}),
    Refusal(f"{INDEX} --split train", 65, "set-0.tar", {"tars/set-0.tar": tarred(*GOOD)[:900]}),
    Refusal(INDEX, 64, "gunzip", {"tars/set-train-0.tar.gz": gzip.compress(tarred(*GOOD))}),
    Refusal(INDEX, 64, "a b-train.tar", {"tars/a b-train.tar": tarred(*GOOD)}),
    Refusal(f"{INDEX} --split holdout", 64, "holdout", TRAIN_TAR),
    Refusal(f"{INDEX} --classes none.txt", 64, "none.txt", TRAIN_TAR),
    Refusal(f"{INDEX} --classes names", 64, ("names", "each line"), TRAIN_TAR | {"names": ""}),
    Refusal(
        "rackrun convert index hf://datasets/timm/imagenet-1k/train-{0000..0003}.tar", 64,
        "hf download --repo-type dataset timm/imagenet-1k",
    ),
    Refusal("rackrun convert index http://127.0.0.1:1/a-train-0.tar", 64, "--resampled"),
    Refusal(
        INDEX, 64, ("dataset.json", "--force"), {"tars": made_by(INDEX, name="tars", **TRAIN_TAR)},
    ),
    Refusal(
        INDEX, 65, ("set-train-1.tar: a", "set-train-0.tar"),
        TRAIN_TAR | {"tars/set-train-1.tar": tarred(*GOOD)}, leaves="report.json",
    ),
    Refusal(
        "rackrun convert index one two --out out", 65,
        ("two/set-train-0.tar: a", "one/set-train-0.tar"),
        {f"{folder}/set-train-0.tar": tarred(*GOOD) for folder in ("one", "two")}, leaves="out",
    ),
    Refusal(
        f"{INDEX} --out out", 65,
        ("set-val-000000.tar/s", "set-train-000000.tar/s", "--allow leaks"),
        {
            f"tars/set-{split}-0.tar": tarred(("o.jpg", drawn(split)), ("o.cls", b"0"), *SAME)
            for split in ("train", "val")
        },
        leaves="out",
    ),
    Refusal(
        f"{INDEX} --val-percent 10", 64, ("--val-percent", "1 tar"),
        {"tars/set-train-0.tar": TARS_OF[0]},
    ),
    Refusal(
        f"{INDEX} --val-percent 10", 65, "class",
        {f"tars/set-train-{n}.tar": TARS_OF[n] for n in (1, 2)},
    ),
    Refusal(
        f"{INDEX} --val-percent 10 --split val", 64, "val",
        {f"tars/set-train-{n}.tar": TARS_OF[n] for n in (0, 3)},
    ),
    Refusal(
        f"{INDEX} --val-percent 91", 64, ("--val-percent 91", "90"),
        {f"tars/set-train-{n}.tar": TARS_OF[n] for n in (0, 3)},
    ),
]  # fmt: skip

# MNIST's four files.
DIGITS = {
    f"{part}-{kind}-ubyte": struct.pack(f">{len(sizes) + 2}L", magic, count, *sizes)
    + bytes(count * math.prod(sizes))
    for part, count in (("train", 10), ("t10k", 4))
    for kind, magic, sizes in (("images-idx3", 2051, (28, 28)), ("labels-idx1", 2049, ()))
}
IMAGES_OF, LABELS_OF = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
UNSEEN = "t10k-images-idx3-ubyte"
MNIST = [
    *(
        Refusal(
            "rackrun convert mnist raw out", 65, (name, *names),
            below("raw", DIGITS | {name: data}),
        )
        for name, names, data in (
            (IMAGES_OF, ["7,856"], DIGITS[IMAGES_OF][:-1]),
            (IMAGES_OF, ["7,857"], DIGITS[IMAGES_OF] + b"x"),
            (IMAGES_OF, ["IDX"], b"<html>"),
            (UNSEEN, ["32x28"], DIGITS[UNSEEN][:8] + b"\0\0\0\x20" + DIGITS[UNSEEN][12:]),
            (
                LABELS_OF,
                ["9 labels", "10 images"],
                DIGITS[LABELS_OF][:4] + b"\0\0\0\x09" + DIGITS[LABELS_OF][8:-1],
            ),
            (LABELS_OF, ["label 9"], DIGITS[LABELS_OF][:-1] + b"\x0a"),
            (LABELS_OF, ["damaged"], gzip.compress(DIGITS[LABELS_OF])[:-9]),
        )
    ),
    Refusal(
        "rackrun convert mnist raw out", 64, LABELS_OF,
        below("raw", {name: data for name, data in DIGITS.items() if name != LABELS_OF}),
    ),
]  # fmt: skip

# Drawn cats and dogs.
DRAW = "python -m rackrun.catdog demo data --images 20"
DEMO = [
    Refusal("python -m rackrun.catdog demo data --images 3", 64, ("--images", "20")),
    Refusal("python -m rackrun.catdog demo", 64, "OUT"),
    Refusal("python -m rackrun.catdog demo /dev/null/demo", 74, "/dev/null/demo"),
    Refusal(DRAW, 65, "train.zip", {"data/train.zip": "precious"}),
    Refusal(
        "python -m rackrun.catdog demo data --images 20 --seed 1", 64, ("train.zip", "seed 0"),
        {"data": made_by(DRAW, name="data")},
    ),
    Refusal(
        DRAW, 74, "data/shards",
        {"data/train.zip": made_by(DRAW, name="data/train.zip"), "data/shards": "in its place"},
        shows="./run-local convert catdog data/train.zip data/shards",
    ),
]  # fmt: skip

ROWS = [
    *(*WORDS, *PLACES, *CLASSES, *LINKS, *CONTENTS, *FINISHED, *TARS, *ZIPS, *PET_SETS),
    *(*TABLES, *MEMBERS, *INDEXED, *MNIST, *DEMO),
]
