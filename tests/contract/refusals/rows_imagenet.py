"""Refusals of ImageNet: layouts that are not whole, and the small files beside the images."""

import gzip
import random
import tarfile
from dataclasses import replace

from tests.lab.data import DEVKIT, Original, SmallImageNet, drawn, tar
from tests.lab.refusal import Refusal
from tests.lab.sources import (
    below,
    changed,
    sparse,
    tar_of,
    written,
    zipped,
)

WNIDS = ("n01440764", "n02012849")
DRAW = random.Random(0)
SMALL = SmallImageNet(
    [Original(f"{wnid}_{n}", wnid, drawn(DRAW.random())) for wnid in WNIDS for n in range(3)],
    [
        Original(f"ILSVRC2012_val_{n:08d}", wnid, drawn(DRAW.random()))
        for n, wnid in enumerate([*WNIDS, *WNIDS], 1)
    ],
)
IMAGENET = "rackrun convert imagenet raw out"
PART = f"{IMAGENET} --subset"
ARCHIVES = {"raw": SMALL.archives}
FOLDERS = {"raw": SMALL.folders}
TRAIN, VAL, KIT = (
    f"raw/{name}"
    for name in ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", f"{DEVKIT}.tar.gz")
)
TRUTH = "ILSVRC2012_validation_ground_truth.txt"


def kit(**files: bytes) -> bytes:
    """Return a devkit in which files have other contents."""
    contents = SMALL.devkit() | files
    return tar({f"data/{name}": data for name, data in contents.items()}, "w:gz")


# What is there, and what is not.
PLACES = [
    Refusal("rackrun convert imagenet nowhere out", 64, "nowhere"),
    Refusal(IMAGENET, 64, "raw", {"raw/": ""}),
    Refusal(f"rackrun convert imagenet {TRAIN} out", 64, "folder", {TRAIN: tar({})}),
    Refusal("rackrun convert imagenet raw/train out --subset", 64, "give ", FOLDERS),
    Refusal(IMAGENET, 64, VAL, {TRAIN: tar({})}),
    Refusal(
        IMAGENET, 64, ("ILSVRC2012_img_train_t3.tar", "ILSVRC2012_img_train.tar"),
        {"raw/ILSVRC2012_img_train_t3.tar": tar({"n02085620.tar": tar({})})},
    ),
    Refusal(
        "rackrun convert imagenet raw/ILSVRC2012_img_train_t3.tar out", 64,
        "ILSVRC2012_img_train.tar",
        {"raw/ILSVRC2012_img_train_t3.tar": tar({"n02085620.tar": tar({})})},
    ),
    Refusal(IMAGENET, 65, ("2 classes, 6 training and 4", "--subset"), ARCHIVES),
    Refusal(f"{IMAGENET} --classes n01440764,n09999999", 64, "n09999999", FOLDERS),
    Refusal(PART, 64, f"{DEVKIT}.tar.gz", below("raw", SMALL.tree(flat=True))),
]  # fmt: skip


def shorter(share: float):
    """Return a download that has ended early, between two members."""
    return changed(lambda data: data.rstrip(b"\0")[: int(len(data) * share) // 512 * 512])


# Archives that are cut off, damaged, or hold no images.
WITH_A_LINK = tar_of("n01440764_1.JPEG", tarfile.SYMTYPE, "/etc/passwd")
ARCHIVE_DAMAGE = [
    *(
        Refusal(PART, 65, (path, "cut off"), ARCHIVES | {path: shorter(share)})
        for path in (TRAIN, VAL)
        for share in (0.5, 0.99)
    ),
    Refusal(
        PART, 65, "n01440764_1.JPEG",
        ARCHIVES | {TRAIN: tar({"n01440764.tar": WITH_A_LINK, "n02012849.tar": tar({})})},
    ),
]  # fmt: skip

# The devkit.


def tar_that_unpacks_without_end() -> bytes:
    """Return a devkit of 100 MiB of zeros."""
    return gzip.compress(tar({f"data/{TRUTH}": bytes(100 << 20)}), 1)


DEVKITS = [
    Refusal(PART, 65, "devkit", ARCHIVES | {KIT: changed(lambda data: data[: len(data) // 2])}),
    Refusal(PART, 65, TRUTH, ARCHIVES | {KIT: kit(**{TRUTH: b"1\n1001"})}),
    Refusal(
        PART, 65, "ILSVRC2012_val_00000003",
        ARCHIVES
        | {
            KIT: tar(
                {
                    f"data/{name}": data
                    for name, data in replace(SMALL, val=SMALL.val[:2]).devkit().items()
                },
                "w:gz",
            )
        },
    ),
    Refusal(
        PART, 65, (KIT, "64 MiB"),
        ARCHIVES | {KIT: written(tar_that_unpacks_without_end)},
    ),
    Refusal(PART, 65, (TRUTH, "64 MiB"), ARCHIVES | {f"raw/{TRUTH}": sparse(100 << 20)}),
]  # fmt: skip

# Kaggle's tables, from the tree and from the zip.
SOLUTION = "LOC_val_solution.csv"
ZIP = zipped(SMALL.kaggle())
FLIPPED = ZIP.index(b"PredictionString\n") + 60
KAGGLE = [
    refusal
    for name, word, data in (
        (SOLUTION, "byte 7", b"ImageId\xff"),
        (SOLUTION, "ImageId,PredictionString", b"ILSVRC2012_val_00000001,n01440764 1 2 3 4\n"),
        (SOLUTION, "row 2", b"ImageId,PredictionString\nx,\n"),
    )
    for files in (SMALL.kaggle() | {name: data},)
    for refusal in (
        Refusal(PART, 65, (name, word), below("raw", files)),
        Refusal(
            "rackrun convert imagenet kaggle.zip out --subset", 65, (name, word),
            {"kaggle.zip": zipped(files)},
        ),
    )
] + [
    Refusal(
        "rackrun convert imagenet kaggle.zip out --subset", 65, SOLUTION,
        {"kaggle.zip": ZIP[:FLIPPED] + b"?" + ZIP[FLIPPED + 1 :]},
    )
]  # fmt: skip

ROWS = [*PLACES, *ARCHIVE_DAMAGE, *DEVKITS, *KAGGLE]
