"""Refusals of shard folders: damage, versions, the doctor, tables of changes."""

import json

from tests.lab.data import drawn
from tests.lab.refusal import Refusal
from tests.lab.sources import (
    below,
    changed,
    classes,
    cut,
    fifo,
    flipped,
    in_place,
    link,
    made_by,
    removed,
    signed,
    sparse,
    tarred,
    with_fields,
)

KEPT = {f"{kind}/v{n}.jpg": drawn(f"{kind} v{n}") for kind in ("cat", "dog") for n in range(2)}
PHOTOS = below("photos/train", classes(6, "cat", "dog")) | below("photos/val", KEPT)
CONVERT = "rackrun convert folder photos data --shards 2 --workers 1"
DATA = {"data": made_by(CONVERT, name="data", **PHOTOS)}
FIRST, INDEX, MANIFEST = (
    f"data/{name}" for name in ("photos-train-000000.tar", "photos-train.index.npy", "dataset.json")
)

# No folder of shards.
NONE = (
    [
        refusal
        for command in ("verify", "summary")
        for refusal in (
            Refusal(f"rackrun convert {command} nowhere", 64, "nowhere"),
            Refusal(f"rackrun convert {command} data", 64, "dataset.json", {"data/": ""}),
            Refusal(f"rackrun convert {command} 'pipe:touch canary'", 64, "pipe:"),
            Refusal(f"rackrun convert {command} data", 65, MANIFEST, {MANIFEST: "<html>"}),
            Refusal(f"rackrun convert {command} data@7", 64, "version 7", DATA),
        )
    ]
    + [
        Refusal(f"rackrun convert summary {location}", 64, location.partition(":")[0])
        for location in ("ssh://host/shards", "file:///data", "ftp://host/a", "s3://bucket/key")
    ]
    + [
        Refusal(f"rackrun convert summary {url}", 64, names)
        for url, names in (
            ("https://h/?list", "https://h/?list"),
            ("http://[::1/", "http://[::1/"),
            ("https://reader:hunter2@h/", ("https://…@h", "RACKRUN_CREDENTIALS")),
        )
    ]
)

# Manifests that cannot be.
MANIFESTS = [
    Refusal("rackrun convert summary data", 65, (MANIFEST, *names), DATA | {MANIFEST: damage})
    for names, damage in (
        (("version",), with_fields(version=None)),
        (("'2'",), with_fields(version=2)),
        (("dataset",), with_fields(dataset="../etc")),
        (("classes[1]",), with_fields(classes=["cat", 3])),
        (("classes",), with_fields(classes=[])),
        (("SHA-256",), with_fields(classes=["dog", "cat"])),
        (("splits",), with_fields(splits=[])),
        (("sha256",), with_fields(sha256=None)),
        (("deeply",), "[" * 100_000),
        (("longer",), sparse((64 << 20) + 1)),
    )
]


def in_split(**fields: object) -> dict[str, object]:
    """Return damage of the manifest's first split."""

    def change(data: bytearray) -> bytes:
        manifest = json.loads(data)
        manifest["splits"][0].update(fields)
        return json.dumps(manifest).encode()

    return DATA | {MANIFEST: changed(change)}


def in_shard(**fields: object) -> dict[str, object]:
    """Return damage of the manifest's first shard."""

    def change(data: bytearray) -> bytes:
        manifest = json.loads(data)
        manifest["splits"][0]["shards"][0].update(fields)
        return json.dumps(manifest).encode()

    return DATA | {MANIFEST: changed(change)}


PARTS = [
    Refusal("rackrun convert summary data", 65, (MANIFEST, name), files)
    for name, files in (
        ("splits[0].name", in_split(name="../up")),
        ("'/etc/passwd'", in_split(index="/etc/passwd")),
        ("29 samples", in_split(samples=29)),
        ("'../up.tar'", in_shard(name="../up.tar")),
        ("samples", in_shard(samples=0)),
    )
]

# Files that are damaged, missing, or none: the first fault is in the message, each is a line.
FAULTS = [
    Refusal("rackrun convert verify data", 65, (culprit, "fault"), DATA | damage, shows=culprit)
    for culprit, damage in (
        ("000000.tar: damaged: its SHA-256", {FIRST: flipped(512)}),
        ("000000.tar", {FIRST: cut(-512)}),
        ("000000.tar", {FIRST: changed(lambda data: data + b"x")}),
        ("000000.tar", {FIRST: removed}),
        ("000000.tar: not a file", {FIRST: in_place(fifo)}),
        ("000000.tar: not a file", {FIRST: in_place(link("/dev/zero"))}),
        ("000000.tar", {FIRST: sparse(1 << 40)}),
        ("train.index.npy: its SHA-256", {INDEX: flipped(-3)}),
        ("train.index.npy", {INDEX: removed}),
        ("train.index.npy: not a file", {INDEX: in_place(fifo)}),
        ("000002.tar: not a part", {"data/photos-train-000002.tar": "x"}),
    )
] + [
    Refusal(
        "rackrun convert verify data", 65, ("2 faults", "000000.tar"),
        DATA | {FIRST: flipped(byte)}, shows=shown,
    )
    for shown, byte in (
        ("000000.tar: the image at byte 1536 is damaged", 1600),
        ("000000.tar: byte 1024: not the header", 1030),
    )
]  # fmt: skip

# Changes of a version.
DROPPED = {"data": made_by(CONVERT, "rackrun convert drop data cat_3", name="data", **PHOTOS)}
CHANGES = [
    Refusal(f"rackrun convert {words}", code, names, DROPPED)
    for words, code, names in (
        ("drop data@1 cat_1", 64, ("data@1", "2")),
        ("drop data@9 cat_1", 64, "data@9"),
        ("drop data", 64, "samples: missing"),
        ("drop data missing.csv", 64, "missing.csv"),
        ("drop data cow_1", 65, "cow_1"),
        ("relabel data cat_1", 64, "KEY=CLASS"),
        ("relabel data cat_1=dgo", 65, ("'dgo'", "did you mean dog")),
        ("append data data", 64, "data"),
        ("append nowhere data", 64, "nowhere"),
        ("append nowhere nowhere", 64, "nowhere"),
        ("drop http://localhost/ cat_1", 64, "http://localhost/"),
        ("shards data data/inside", 64, "data/inside"),
        ("shards data@7 plain", 64, "version 7"),
        ("shards data plain --val-percent 5", 64, "--val-percent"),
    )
] + [
    Refusal(
        "rackrun convert append images data", 65, "'sharpen'",
        DATA | {MANIFEST: signed(preset={"sharpen": True})},
    ),
    Refusal(
        "rackrun convert shards data plain", 65, "size",
        DATA | {MANIFEST: signed(preset={"size": "8"})},
    ),
]  # fmt: skip

# Tables of changes, as the doctor writes them.
HEAD = "split,shard,key,class,problem,action,new_class,score,reason\n"
GOOD = ",,cat_1,,,relabel,dog,,\n"
ROWS_OF_TABLES = [
    Refusal(
        "rackrun convert relabel data t.csv", 65, ("t.csv: line 3", *names),
        DATA | {"t.csv": f"{HEAD}{GOOD}{row}\n"},
    )
    for names, row in (
        (("cow_1",), ",,cow_1,,,relabel,dog,,"),
        (("no key",), ",,,,,relabel,dog,,"),
        (("cat_2", "'dgo'", "did you mean dog"), ",,cat_2,,,relabel,dgo,,"),
        (("cat_2", "new_class"), ",,cat_2,,,relabel,,,"),
        (("cat_1", "two classes"), ",,cat_1,,,relabel,cat,,"),
    )
]  # fmt: skip

# What cannot be appended.
APPENDS = [
    Refusal(
        "rackrun convert append new data", 64, ("convert index", "--out FOLDER"),
        DATA | {"new/set-train-1.tar": tarred(("x.jpg", drawn("x")), ("x.cls", b"0"))},
    ),
    Refusal(
        "rackrun convert append leaky data --workers 1", 65, "train/dog/new.jpg",
        DATA
        | below(
            "leaky",
            {
                f"{split}/{kind}/o.jpg": drawn(f"{split} {kind}")
                for split in ("train", "val")
                for kind in ("cat", "dog")
            },
        )
        | {"leaky/train/dog/new.jpg": KEPT["dog/v0.jpg"]},
        leaves="data",
    ),
]  # fmt: skip

# The doctor.
DOCTOR = [
    Refusal("rackrun doctor nowhere", 64, "nowhere"),
    Refusal("rackrun doctor", 64, "DATA"),
    Refusal("rackrun doctor data --out nowhere", 64, "mkdir -p nowhere", DATA),
    Refusal("rackrun doctor data runs/none", 64, "runs/none", DATA),
]

ROWS = [
    *(*NONE, *MANIFESTS, *PARTS, *FAULTS, *CHANGES, *ROWS_OF_TABLES, *APPENDS, *DOCTOR),
]
