"""verify reads everything again and names what is wrong; summary says what is there."""

import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rackrun.convert.__main__ import main
from rackrun.errors import DataError, UsageError
from rackrun.nginx.serve import serving
from rackrun.nginx.site import Site
from rackrun.shards.index import Manifest
from tests.convert.conftest import Convert
from tests.lab.drawn import kaggle, write_zip
from tests.lab.nginx_processes import access_log

FIRST = "catdog-train-000000.tar"


@pytest.fixture
def folder(tmp_path: Path, convert: Convert) -> Path:
    """Return three training shards and one of validation."""
    source = write_zip(tmp_path / "train.zip", kaggle(20))
    return convert("catdog", source, "--shards", 3)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def exchange(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def test_a_whole_folder_passes(folder, capsys):
    """Nothing is wrong: one line with the counts, or the same for programs."""
    main(["verify", str(folder)])
    assert "40 samples in 4 shards, all as it should be" in capsys.readouterr().out
    main(["verify", str(folder), "--json"])
    counted = {"location": str(folder), "versions": [1], "samples": 40, "shards": 4}
    assert json.loads(capsys.readouterr().out) == {**counted, "faults": [], "copies": []}


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda f: flip(f / FIRST, 1600),
            f"{FIRST}: the image at byte 1536 is damaged .sample (cat|dog)_",
        ),
        (lambda f: flip(f / FIRST, 3), f"{FIRST}: byte 0: not the header of a sample's member"),
        (lambda f: flip(f / FIRST, 512), "differs from its index"),
        (lambda f: flip(f / FIRST, -1), f"{FIRST}: damaged: its SHA-256"),
        (lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes()[:-512]), "in the manifest"),
        (lambda f: (f / FIRST).write_bytes(b""), f"{FIRST}: 0 bytes long, not the"),
        (lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes() + b"x"), "in the manifest"),
        (lambda f: (f / FIRST).unlink(), f"{FIRST}: cannot be read: No such file"),
        (lambda f: flip(f / "catdog-val.index.npy", -3), "catdog-val.index.npy: its SHA-256"),
        (lambda f: (f / "catdog-train.index.npy").unlink(), "cannot be read: No such file"),
        (lambda f: exchange(f / FIRST, os.mkfifo), f"{FIRST}: not a file"),
        (lambda f: exchange(f / FIRST, zeros), f"{FIRST}: not a file"),
        (lambda f: exchange(f / "catdog-val.index.npy", os.mkfifo), "not a file"),
        (lambda f: (f / "catdog-train-000003.tar").write_bytes(b"x"), "not a part of this data"),
        (
            lambda f: (f / FIRST).write_bytes((f / "catdog-train-000001.tar").read_bytes()),
            "differs from its index|is damaged|in the manifest",
        ),
    ],
)
def test_every_damage_is_named(damage, says, folder, capsys):
    """A flipped bit, a cut, a missing, swapped or additional file: found, with its place."""
    damage(folder)
    with pytest.raises(DataError, match="fault"):
        main(["verify", str(folder)])
    assert re.search(says, capsys.readouterr().out)


def test_all_faults_are_named_not_the_first(folder, capsys):
    """Two images of one shard and one of another: three lines, and the shards' digests."""
    flip(folder / FIRST, 1600)
    flip(folder / FIRST, -1600)
    flip(folder / "catdog-val-000000.tar", 1600)
    with pytest.raises(DataError, match="5 faults"):
        main(["verify", str(folder)])
    out = capsys.readouterr().out
    assert out.count("is damaged") == 3 and out.count("its SHA-256") == 2
    with pytest.raises(DataError, match="5 faults"):
        main(["verify", str(folder), "--json"])
    assert json.loads(capsys.readouterr().out)["faults"] == out.splitlines()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "version '2', and this program reads 1"),
        ({"dataset": "../etc"}, "manifest.dataset: not of the expected form"),
        ({"classes": []}, "classes"),
        ({"classes": ["one"]}, "damaged: its SHA-256"),
        ({"splits": []}, "no splits"),
        ({"seed": "0"}, "manifest.seed: str in place of int"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(change, says, folder, capsys):
    """A manifest of another version, with paths for names, or that contradicts its index."""
    manifest = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps(manifest | change))
    with pytest.raises(DataError) as problem:
        main(["verify", str(folder)])
    assert says in f"{problem.value}{capsys.readouterr().out}"


@pytest.mark.parametrize("command", ["verify", "summary"])
def test_what_is_no_shard_folder_is_refused(command, tmp_path):
    """No folder, an unfinished one, a manifest that is no JSON, a pipe: one line each."""
    with pytest.raises(UsageError, match="there is no such folder"):
        main([command, str(tmp_path / "nowhere")])
    with pytest.raises(UsageError, match="dataset.json is missing"):
        main([command, str(tmp_path)])
    with pytest.raises(UsageError, match="read from a folder or from http"):
        main([command, f"pipe:touch {tmp_path}/canary"])
    assert not (tmp_path / "canary").exists()
    (tmp_path / "dataset.json").write_text("<html>")
    with pytest.raises(DataError, match="dataset.json: not a data set manifest"):
        main([command, str(tmp_path)])


def test_the_summary(folder, capsys):
    """Shards in brace form, counts, bytes and classes on one page."""
    main(["summary", str(folder)])
    printed = capsys.readouterr().out
    assert "catdog: 2 classes, original bytes, seed 0" in printed
    assert "catdog-train-{000000..000002}.tar" in printed
    assert "catdog-val-000000.tar" in printed
    assert "36 samples, " in printed and "cat 18, dog 18" in printed and "cat 2, dog 2" in printed
    size = sum(path.stat().st_size for path in folder.glob("catdog-train-*.tar"))
    assert f"{size:,} bytes in 3 shards of 12" in printed


@pytest.fixture
def served(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folder, copied to where nginx may enter, and its address."""
    with tempfile.TemporaryDirectory() as top:
        Path(top).chmod(0o755)
        copy = shutil.copytree(folder, Path(top) / "shards")
        with serving(Site(copy, port=0, native=True)) as server:
            yield copy, server.url


def test_a_server_is_verified_like_a_folder(served, capsys):
    """Over HTTP the same faults are named, and summary prints the same page."""
    folder, url = served
    main(["verify", url])
    assert "40 samples in 4 shards, all as it should be" in capsys.readouterr().out
    main(["summary", url])
    over_http = capsys.readouterr().out
    main(["summary", str(folder)])
    assert capsys.readouterr().out == over_http
    flip(folder / FIRST, 1600)
    with pytest.raises(DataError, match="fault"):
        main(["verify", url])
    assert "the image at byte 1536 is damaged" in capsys.readouterr().out


def test_each_index_is_read_once(folder):
    """One process reads it for all shards and workers: ImageNet's takes 100 MB and a second."""
    with tempfile.TemporaryDirectory() as top:
        Path(top).chmod(0o755)
        copy = shutil.copytree(folder, Path(top) / "shards")
        with (
            access_log() as log,
            serving(log.site(copy)) as server,
        ):
            main(["verify", server.url, "--workers", "2"])
            read = Counter(path for path, _, _ in log.requests)
    assert read["/catdog-train.index.npy"] == read["/catdog-val.index.npy"] == 1


def test_a_manifest_survives_being_read(folder):
    """Reading and writing a manifest again changes no byte, so its digest identifies the data."""
    text = (folder / "dataset.json").read_bytes()
    assert Manifest.parse(text, "").serialise() == text


def test_swapped_class_names_are_found(folder):
    """No digest of a shard covers them; a manifest without its own digest is refused."""
    path = folder / "dataset.json"
    manifest = json.loads(path.read_text())
    swapped = {**manifest, "classes": manifest["classes"][::-1]}
    path.write_text(json.dumps(swapped))
    with pytest.raises(DataError, match=r"dataset\.json: .*damaged: its SHA-256"):
        main(["verify", str(folder)])
    del swapped["sha256"]
    path.write_text(json.dumps(swapped))
    with pytest.raises(DataError, match=r"dataset\.json: .*sha256"):
        main(["verify", str(folder)])


@pytest.mark.parametrize("kind", ["fifo", "zero", "longer"])
def test_what_is_no_shard_does_not_hang_the_verification(folder, capsys, kind):
    """A pipe, or a device without an end, in its place: one line."""
    path = min(folder.glob("*.tar"))
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(DataError, match="faults?; convert or copy it again"):
        main(["verify", str(folder)])
    assert path.name in capsys.readouterr().out
