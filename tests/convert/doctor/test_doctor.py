"""The doctor finds what was planted among real images, names it, and shows nothing as it came."""

import csv
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

import rackrun.convert.doctor.command as command
from rackrun.cli.doctor import main
from rackrun.convert.__main__ import main as convert_main
from rackrun.convert.doctor.checks import LABEL, LEAK, Finding, ordered
from rackrun.convert.doctor.fingerprints import FINGERPRINT, SOUND, UNDECODED, fingerprint
from rackrun.convert.doctor.near_copies import Prints, near_pairs, neighbour_distances
from rackrun.nginx.serve import serving
from rackrun.nginx.site import Site
from rackrun.shards.open import open_source
from tests.convert.conftest import Convert
from tests.lab.data import digits
from tests.lab.run import write
from tests.lab.waiting import until

Rows = list[dict[str, str]]
SIDE = 85  # pixels of a part of a photograph


def jpeg(image: Image.Image, quality: int = 92) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def parts(count: int = 40) -> list[Image.Image]:
    """Return parts of scikit-learn's two photographs, none of which overlap."""
    from sklearn.datasets import load_sample_images

    photographs = map(Image.fromarray, load_sample_images().images)
    patches = [
        photograph.crop((left, top, left + SIDE, top + SIDE))
        for photograph in photographs
        for left in range(0, photograph.width - SIDE, SIDE)
        for top in range(0, photograph.height - SIDE, SIDE)
    ]
    return [part for part in patches if np.std(part) > 30][:count]


def clean_set(count: int = 40) -> dict[str, bytes]:
    """Return images of two classes, half of them of validation, all different."""
    images = parts(count)
    files = {}
    for number, image in enumerate(images):
        split, kind = ("val", "train")[number % 8 > 1], ("oak", "pine")[number % 2]
        files[f"{split}/{kind}/{number}.jpg"] = jpeg(image)
    return files


@pytest.fixture
def examine(tmp_path: Path, convert: Convert) -> Callable[..., Rows]:
    """Return a function that converts files, has the doctor look, and returns doctor.csv's rows."""

    def run(files: dict[str, bytes], *options: str) -> Rows:
        write(tmp_path / "set", files)
        convert("folder", tmp_path / "set", "--allow", "leaks", "--workers", 1, *options)
        return rows_of(tmp_path / "out", tmp_path)

    return run


def rows_of(data: object, folder: Path) -> Rows:
    assert main([str(data), "--out", str(folder), "--workers", "1"]) == 0
    with (folder / "doctor.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def of(rows: Rows, problem: str) -> set[tuple[str, str, str]]:
    """Return stem, action and split of each row of a problem."""
    return {
        (row["key"].partition("_")[2], row["action"], row["split"])
        for row in rows
        if row["problem"] == problem
    }


def test_nothing_is_found_where_nothing_is(examine, capsys):
    """Forty parts of two photographs, cut side by side: no finding, and the command says so."""
    assert examine(clean_set()) == []
    assert "nothing found" in capsys.readouterr().out


def test_exact_copies_are_named_by_what_they_spoil(tmp_path, examine, capsys):
    """Of a leak the training image goes, of a copy one stays, two classes are for a person; the
    output has the counts and the command that drops, also of a version by its number."""
    files = clean_set()
    files["train/oak/again.jpg"] = files["train/oak/2.jpg"]
    files["train/oak/pine.jpg"] = files["train/pine/3.jpg"]
    files["train/pine/leak.jpg"] = files["val/oak/8.jpg"]
    rows = examine(files)
    assert of(rows, "leak") == {("leak", "drop", "train")}
    (copy,) = of(rows, "copy")
    assert copy in {("again", "drop", "train"), ("2", "drop", "train")}
    assert of(rows, "two classes") == {("pine", "", "train"), ("3", "", "train")}
    assert len(rows) == 4
    printed = capsys.readouterr().out
    assert re.search(r"^leak +1 +1 ", printed, re.MULTILINE)
    assert re.search(r"convert drop \S+/out \S+/doctor.csv", printed)
    assert rows_of(f"{tmp_path / 'out'}@1", tmp_path) == rows
    assert re.search(r"convert drop \S+/out \S+/doctor.csv", capsys.readouterr().out)


CHANGES: dict[str, Callable[[Image.Image], bytes]] = {
    "encoded": lambda image: jpeg(image, 30),
    "scaled": lambda image: jpeg(image.resize((60, 60))),
    "squeezed": lambda image: jpeg(image.resize((120, 90))),
    "cropped": lambda image: jpeg(image.crop((3, 2, SIDE - 1, SIDE - 2))),
    "mirrored": lambda image: jpeg(ImageOps.mirror(image)),
    "darker": lambda image: jpeg(image.point(lambda level: int(0.6 * level))),
    "gray": lambda image: jpeg(image.convert("L")),
}


def test_near_copies_are_found_however_they_were_made(examine):
    """Encoded anew, scaled, squeezed, cropped, mirrored, darker, gray: each is found beside its
    original; the smaller goes, in train rather than in val; of two classes, a person decides."""
    files, images = clean_set(), parts()
    originals = dict(zip(CHANGES, (2, 7, 12, 16, 21, 28, 31), strict=True))
    for name, number in originals.items():
        files[f"train/{('oak', 'pine')[number % 2]}/{name}.jpg"] = CHANGES[name](images[number])
    files["train/pine/other.jpg"] = jpeg(images[38], 40)
    rows = examine(files)
    pairs = {}
    for row in rows:
        assert row["problem"] in ("near copy", "near leak"), row
        first = row["key"].partition("_")[2]
        second = re.search(r" \w+?_(\w+) in ", row["reason"])
        assert second
        pairs[frozenset((first, second[1]))] = (row["problem"], row["action"], first)
    assert pairs.keys() == {
        *(frozenset((name, str(number))) for name, number in originals.items()),
        frozenset(("other", "38")),
    }
    for name, number in originals.items():
        problem, action, dropped = pairs[frozenset((name, str(number)))]
        assert (problem, action) == ("near leak" if number == 16 else "near copy", "drop")
        assert dropped == name or name == "squeezed"  # it has more pixels
    assert pairs[frozenset(("other", "38"))][1] == ""


def test_images_of_one_kind_are_not_copies_of_one_another():
    """Of 300 real digits, many of which look alike, four pairs at most are taken for copies; a
    darker copy of one is found."""
    images = [Image.fromarray(pixels) for pixels in digits()[0][:300]]
    fingerprints = np.stack([fingerprint(jpeg(image)) for image in images])
    assert len(near_pairs(Prints.of(fingerprints), 1)) <= 4
    darker = fingerprint(jpeg(images[7].point(lambda level: level // 2)))
    pairs = near_pairs(Prints.of(np.concatenate([fingerprints, darker[None]])), 1)
    assert (7, 300) in {pair[:2] for pair in pairs}


def test_a_neighbour_is_the_fifth_nearest_of_the_others():
    """By 1 - correlation, an image itself left out; at most a quarter off the median of all."""
    thumbs = np.random.default_rng(5).integers(256, size=(60, 16, 16)).astype(np.uint8)
    thumbs[1:9] = thumbs[0]  # many copies: their fifth-nearest is a copy, too
    correlations = np.corrcoef(thumbs.reshape(60, -1).astype(float))
    np.fill_diagonal(correlations, -1)
    distances = 1 - np.sort(correlations, axis=1)[:, -5]
    typical = np.median(distances)
    expected = distances.clip(0.25 * typical, 1.25 * typical)
    assert np.allclose(neighbour_distances(thumbs), expected, atol=1e-5)


def test_every_image_is_compared_with_every_other(monkeypatch):
    """Pairs are found wherever their rows fall among the blocks that are compared at once."""
    monkeypatch.setattr("rackrun.convert.doctor.near_copies.ROWS", 4)
    monkeypatch.setattr("rackrun.convert.doctor.near_copies.COLUMNS", 8)
    monkeypatch.setattr("rackrun.convert.doctor.near_copies.JOB_ROWS", 12)
    images = parts(25)
    fingerprints = np.stack([fingerprint(jpeg(image)) for image in images])
    order = np.random.default_rng(3).permutation(50)
    again = np.stack([fingerprint(jpeg(ImageOps.mirror(image), 70)) for image in images])
    both = np.concatenate([fingerprints, again])[order]
    pairs = {pair[:2] for pair in near_pairs(Prints.of(both), 2)}
    position = np.argsort(order)
    expected = {tuple(sorted((int(position[n]), int(position[n + 25])))) for n in range(25)}
    assert pairs == expected


def test_images_and_classes_that_stand_out_are_named(examine):
    """An empty image goes; a strip, a thumbnail, a small class, two classes of one name in two
    spellings are for a person."""
    files = clean_set()
    files["train/oak/black.jpg"] = jpeg(Image.new("RGB", (SIDE, SIDE)))
    files["train/oak/strip.jpg"] = jpeg(parts(2)[1].resize((SIDE * 4, SIDE)))
    files["train/oak/tiny.jpg"] = jpeg(Image.effect_noise((20, 20), 90))
    files["train/Pine/p.jpg"] = jpeg(Image.effect_noise((90, 90), 90))
    rows = examine(files, "--allow", "similar-classes")
    assert of(rows, "nearly empty") == {("black", "drop", "train")}
    assert of(rows, "odd shape") == {("strip", "", "train")}
    assert of(rows, "odd size") == {("tiny", "", "train")}
    classes = [(row["problem"], row["class"], row["reason"]) for row in rows if not row["key"]]
    assert ("small class", "Pine", "1 image in train") in classes
    assert ("small class", "Pine", "0 images in val") in classes
    assert ("similar classes", "pine", "alike: 'Pine'") in classes


def test_a_damaged_image_is_counted_and_the_rest_is_looked_at(tmp_path, examine):
    """A flipped byte in a shard: its image is named and left alone, and a copy elsewhere is still
    found; a shard that ends early hides its images, and the doctor says so."""
    files = clean_set()
    files["train/oak/again.jpg"] = files["train/oak/2.jpg"]
    examine(files, "--shards", "2")
    shards = sorted((tmp_path / "out").glob("*-train-*.tar"))
    data = bytearray(shards[0].read_bytes())
    data[2000] ^= 1
    shards[0].write_bytes(data)
    rows = rows_of(tmp_path / "out", tmp_path)
    (damaged,) = (row for row in rows if row["problem"] == "damaged")
    assert damaged["action"] == "" and "copy the shard again" in damaged["reason"]
    shards[1].write_bytes(shards[1].read_bytes()[:4096])
    rows = rows_of(tmp_path / "out", tmp_path)
    assert len([row for row in rows if row["problem"] == "damaged"]) > 10


@pytest.mark.parametrize(
    "data",
    [
        jpeg(parts(1)[0])[:1500],
        b"",
        b"GIF89a",
        jpeg(Image.new("L", (20000, 8))),
        jpeg(parts(1)[0])[:-2] + b"\xff\xda" * 200 + b"\xff\xd9",
    ],
    ids=["cut", "empty", "header", "strip", "scans"],
)
def test_what_cannot_be_decoded_is_marked(data):
    """Whatever the bytes are, the look says so and nothing is raised."""
    assert fingerprint(data)["state"] == UNDECODED
    assert fingerprint(jpeg(parts(1)[0]))["state"] == SOUND


@pytest.mark.security("DATA-8")
def test_names_of_strangers_stay_text(tmp_path, examine, capsys):
    """A class whose name is HTML is shown as text, in a page without scripts or addresses."""
    evil = "<img src=x onerror=alert(1)>"
    files = {name.replace("/pine/", f"/{evil}/"): data for name, data in clean_set().items()}
    files[f"train/{evil}/again.jpg"] = files[f"train/{evil}/3.jpg"]
    (row,) = examine(files)
    assert row["class"] == evil
    page = (tmp_path / "doctor.html").read_text()
    assert evil not in page and "&lt;img src=x onerror" in page
    assert "<script" not in page and not re.search(r'<[^>]+(src|href)="(?!data:)', page)
    assert page.count("data:image/jpeg") == 2


def test_no_name_of_a_stranger_is_a_formula_in_a_spreadsheet(tmp_path, examine):
    """A cell with what would be computed begins with an apostrophe; `drop` knows the sample."""
    evil = "=1+cmd|' C calc'!A0"
    files = {name.replace("/pine/", f"/{evil}/"): data for name, data in clean_set().items()}
    files[f"train/{evil}/again.jpg"] = files[f"train/{evil}/3.jpg"]
    (row,) = examine(files)
    assert row["class"] == f"'{evil}" and row["action"] == "drop"
    assert not any(cell.startswith(("=", "+", "-", "@")) for cell in row.values())
    convert_main(["drop", str(tmp_path / "out"), str(tmp_path / "doctor.csv"), "--workers", "1"])
    assert open_source(str(tmp_path / "out")).manifest.change == {"dropped": 1}


def test_a_table_that_was_worked_on_is_not_replaced(tmp_path, examine, capsys):
    """The next doctor writes beside it, and prints the commands with the new name; a table that
    nobody has changed is replaced."""
    files = clean_set()
    files["train/oak/again.jpg"] = files["train/oak/2.jpg"]
    examine(files)
    table, page = tmp_path / "doctor.csv", tmp_path / "doctor.html"
    written = table.read_bytes()
    rows_of(tmp_path / "out", tmp_path)
    assert table.read_bytes() == written and not list(tmp_path.glob("doctor-*"))
    edited = written.replace(b",drop,", b",,")
    table.write_bytes(edited)
    before = page.read_bytes()
    for _ in range(2):  # the second one is nobody's work
        rows_of(tmp_path / "out", tmp_path)
    assert (table.read_bytes(), page.read_bytes()) == (edited, before)
    assert (tmp_path / "doctor-2.csv").read_bytes() == written
    assert {path.name for path in tmp_path.glob("doctor*")} == {
        *("doctor.csv", "doctor.html", "doctor-2.csv", "doctor-2.html")
    }
    printed = capsys.readouterr()
    assert f"{table}: stays, as it was changed since a doctor wrote it" in printed.err
    assert f"drop {tmp_path / 'out'} {tmp_path / 'doctor-2.csv'}" in printed.out


def test_without_the_extra_the_rest_is_found(examine, monkeypatch, capsys):
    """Where imagehash is not installed, exact copies are found, and the output names the extra."""
    monkeypatch.setattr(command, "HAS_HASHES", False)
    monkeypatch.setattr("rackrun.convert.doctor.fingerprints.HAS_HASHES", False)
    files = clean_set()
    files["train/oak/again.jpg"] = files["train/oak/2.jpg"]
    files["train/oak/near.jpg"] = jpeg(parts()[6], 40)
    assert [row["problem"] for row in examine(files)] == ["copy"]
    assert "doctor]" in capsys.readouterr().err


def test_a_served_folder_is_looked_at_like_one_here(tmp_path, examine):
    """Over HTTP the same rows are found."""
    files = clean_set()
    files["train/oak/again.jpg"] = files["train/oak/2.jpg"]
    files["train/oak/near.jpg"] = jpeg(parts()[6], 40)
    local_rows = examine(files)
    with tempfile.TemporaryDirectory() as top:
        Path(top).chmod(0o755)
        copy = shutil.copytree(tmp_path / "out", Path(top) / "shards")
        with serving(Site(copy, port=0, native=True)) as server:
            assert rows_of(server.url, tmp_path) == local_rows
    assert len(local_rows) == 2


def test_ctrl_c_leaves_no_file_and_no_worker(tmp_path, convert):
    """Interrupted while it looks, the command ends with 130; nothing is written, nobody stays."""
    noise = [jpeg(Image.effect_noise((1500, 1500), 60)) for _ in range(3)]
    files = {f"train/{n % 2}/{n}.jpg": noise[n % 3] + bytes([n]) for n in range(120)}
    write(tmp_path / "set", files)
    convert("folder", tmp_path / "set", "--val-percent", 0, "--workers", 1)
    args = [sys.executable, "-m", "rackrun", "doctor", str(tmp_path / "out"), "--workers", "2"]
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen(
        args, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, start_new_session=True
    )
    until(lambda: len(group(process.pid)) == 3, "both workers run", 60)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert b"Traceback" not in errors
    assert not group(process.pid)
    assert {path.name for path in tmp_path.iterdir()} == {"set", "out"}


def group(leader: int) -> list[int]:
    """Return the living processes of a group."""
    workers = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == leader and fields[0] != "Z":
            workers.append(int(stat.parent.name))
    return workers


def test_a_look_is_small():
    """100,000 images take 35 MB: what is kept of each has a fixed size."""
    assert FINGERPRINT.itemsize <= 350


def test_the_gravest_come_first_and_of_each_problem_the_surest():
    """A person who looks at a few rows only looks at those that matter most."""
    findings = [Finding(LABEL, None, 0, "", score=score) for score in (0.2, 0.9, 0.5)]
    by_gravity = ordered([*findings, Finding(LEAK, None, 0, "")])
    assert [(each.problem, each.score) for each in by_gravity] == [
        (LEAK, None),
        *((LABEL, score) for score in (0.9, 0.5, 0.2)),
    ]
