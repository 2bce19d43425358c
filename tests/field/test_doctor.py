"""The doctor finds what was put among real digits; its table cleans the data set."""

import csv
import io
import re

import numpy as np
import pytest
from PIL import Image

from tests.lab.data import digits, drawn, encoded
from tests.lab.foreign import count
from tests.lab.run import write

TRAIN, VAL, WRONG, LEAKS = 900, 180, 54, 10


def rows_of(folder, name="doctor.csv"):
    with (folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


def as_excel_saves(rows):
    """Return a table as a spreadsheet of a country with decimal commas saves it."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=";", lineterminator="\r\n")
    writer.writerow(rows[0])
    writer.writerows([cell.replace(".", ",") for cell in row.values()] for row in rows)
    return b"\xef\xbb\xbf" + text.getvalue().encode()


def looked_at(cli, folder, files):
    """Return the doctor's rows about these files, and what it printed."""
    write(folder, files)
    result = cli("rackrun convert folder set data --allow leaks --workers 1")
    assert result.code == 0, result
    result = cli("rackrun doctor data")
    assert result.code == 0, result
    return rows_of(folder), result


def pictures():
    return {
        f"set/{split}/{kind}/{n}.jpg": drawn(f"{split} {kind} {n}", (96, 72))
        for split, kind, number in (("train", "oak", 12), ("train", "pine", 12), ("val", "oak", 4))
        for n in range(number)
    }


def test_wrong_labels_and_leaks_of_real_digits_are_found_and_mended(cli, tmp_path):
    """With 5 % wrong labels: all leaks, two thirds of the wrong labels, and one false alarm in
    six at most; `drop` and `relabel` take the table as Excel saves it."""
    images, true = digits()
    labels, random = true.astype(int), np.random.default_rng(7)
    wrong = random.choice(TRAIN + VAL, WRONG, replace=False)
    labels[wrong] = (labels[wrong] + random.integers(1, 10, WRONG)) % 10
    files = {
        f"set/{'train' if n < TRAIN else 'val'}/{labels[n]}/{n}.png": encoded(
            Image.fromarray(images[n]), "PNG"
        )
        for n in range(TRAIN + VAL)
    }
    for n in range(TRAIN, TRAIN + LEAKS):
        files[f"set/train/{labels[n]}/leak{n}.png"] = files[f"set/val/{labels[n]}/{n}.png"]
    write(tmp_path, files)
    for line in (
        "rackrun convert folder set data --allow leaks",
        "rackrun local mnist --data data --eval-split val --epochs 6 --batch-size 32",
        "rackrun doctor data runs/latest",
    ):
        result = cli(line)
        assert result.code == 0, result
    assert re.search(r"convert relabel data doctor.csv", result.out), result
    rows = rows_of(tmp_path)
    leaks = {(row["key"], row["split"], row["action"]) for row in rows if row["problem"] == "leak"}
    assert {key.partition("_")[2] for key, _, _ in leaks} == {
        f"leak{n}" for n in range(TRAIN, TRAIN + LEAKS)
    }
    assert {(split, action) for _, split, action in leaks} == {("train", "drop")}
    doubted = {
        int(row["key"].partition("_")[2]): row["new_class"]
        for row in rows
        if row["problem"] == "label" and "leak" not in row["key"]
    }
    found = doubted.keys() & set(wrong.tolist())
    assert len(found) >= 2 / 3 * WRONG and len(found) >= 5 / 6 * len(doubted)
    assert sum(doubted[n] == str(true[n]) for n in found) >= 0.9 * len(found)
    assert {row["action"] for row in rows if row["problem"] == "label"} == {"relabel"}

    (tmp_path / "doctor.csv").write_bytes(as_excel_saves(rows))
    for action in ("drop", "relabel", "relabel"):
        result = cli(f"rackrun convert {action} data doctor.csv")
        assert result.code == 0 and "another state" not in result.err, result
    assert "nothing to relabel" in result.err
    assert count(tmp_path / "data") == TRAIN + VAL
    assert cli("rackrun doctor data --out .").code == 0
    assert not [row for row in rows_of(tmp_path, "doctor-2.csv") if row["problem"] == "leak"]


def test_copies_and_odd_images_are_named_by_what_they_spoil(cli, tmp_path):
    """Of a copy one stays, two classes are for a person, as is a strip; damage is named, and all
    else is looked at."""
    files = pictures()
    files["set/train/oak/again.jpg"] = files["set/train/oak/2.jpg"]
    files["set/train/oak/pine.jpg"] = files["set/train/pine/3.jpg"]
    files["set/train/oak/strip.jpg"] = drawn("strip", (400, 60))
    rows, _ = looked_at(cli, tmp_path, files)
    of = {row["problem"]: row for row in rows}
    assert (of["copy"]["action"], of["two classes"]["action"]) == ("drop", "")
    assert of["odd aspect ratio"]["key"].endswith("strip")
    shard = next((tmp_path / "data").glob("*train*.tar"))
    data = bytearray(shard.read_bytes())
    data[2000] ^= 1
    shard.write_bytes(data)
    assert cli("rackrun doctor data").code == 0
    (damaged,) = (row for row in rows_of(tmp_path) if row["problem"] == "damaged")
    assert damaged["action"] == "" and "copy the shard again" in damaged["reason"]


@pytest.mark.security("DATA-8")
def test_names_of_others_stay_text_in_page_table_and_terminal(cli, tmp_path):
    """A class whose name is HTML, a formula of a spreadsheet or an order to a terminal is shown as
    text, and the table still names its images."""
    evil = ("<img src=x onerror=alert(1)>", "=1+cmd|' C calc'!A0", "\x1b]0;owned\x07")
    files = pictures()
    for number, name in enumerate(evil):
        images = [drawn(f"{name} {n}", (96, 72)) for n in range(9)]
        files |= {f"set/train/{name}/{number} {n}.jpg": image for n, image in enumerate(images)}
        files[f"set/train/{name}/again {number}.jpg"] = images[3]
    rows, result = looked_at(cli, tmp_path, files)
    copies = [row for row in rows if row["problem"] == "copy"]
    assert len(copies) == len(evil)
    assert not any(cell.startswith(("=", "+", "-", "@")) for row in rows for cell in row.values())
    page = (tmp_path / "doctor.html").read_text()
    assert "<img src=x" not in page and "\x1b" not in page and "<script" not in page
    assert not re.search(r'<[^>]+(src|href)="(?!data:)', page)
    dropped = cli("rackrun convert drop data doctor.csv")
    assert dropped.code == 0 and "\x1b" not in result.out + dropped.err, dropped
    (tmp_path / "t.csv").write_text("shard,key,class,action\n../../x,\x1b[2Ja,\x1b[2J,drop\n")
    refused = cli("rackrun convert drop data t.csv")
    assert refused.code == 65 and "\x1b" not in refused.err and refused.err.count("error: ") == 1


def test_a_table_that_was_worked_on_is_not_replaced(cli, tmp_path):
    """The next doctor writes beside it; a table that nobody has changed is replaced."""
    files = pictures()
    files["set/train/oak/again.jpg"] = files["set/train/oak/2.jpg"]
    looked_at(cli, tmp_path, files)
    edited = (tmp_path / "doctor.csv").read_bytes().replace(b",drop,", b",,")
    (tmp_path / "doctor.csv").write_bytes(edited)
    for _ in range(2):
        result = cli("rackrun doctor data")
        assert "doctor.csv: kept" in result.err and "doctor-2.csv" in result.out, result
    assert (tmp_path / "doctor.csv").read_bytes() == edited
    assert not (tmp_path / "doctor-3.csv").exists()
