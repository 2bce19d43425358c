"""Folders of other programs' tars get versions: more tars, fewer samples, other classes."""

import json
import tarfile
from pathlib import Path

import pytest
import webdataset

from rackrun.convert.__main__ import main
from rackrun.convert.packing.stored_samples import keys_of, relabelled, shards_of
from rackrun.convert.verify import strangers
from rackrun.errors import DataError, UsageError
from rackrun.shards.index import Manifest, Row
from rackrun.shards.open import open_source, sources_of
from tests.convert.conftest import labels, manifest_of, photos, run, stock
from tests.lab.data import (
    as_hugging_face,
    by_name,
    by_webdataset,
    drawn,
    everything,
    tars_in,
    write_tar,
)


def more(folder: Path, number: int, split: str = "train", **labels: int) -> Path:
    """Write one more tar as webdataset does, with these keys."""
    folder.mkdir(exist_ok=True)
    path = folder / f"imagenet-{split}-{number:06d}.tar"
    with path.open("wb") as file, webdataset.TarWriter(file) as sink:
        for key, label in labels.items():
            sink.write({"__key__": key, "jpg": drawn(key), "cls": label})
    return path


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Return a folder of tars that has been indexed."""
    folder = tmp_path / "tars"
    folder.mkdir()
    by_webdataset(folder)
    main(["index", str(folder)])
    return folder


def test_tars_that_come_into_the_folder_are_its_next_version(tars, capsys):
    """The folder is appended to itself: only what no version lists is read, no tar changes."""
    more(tars, 2, new0=0, new1=4)
    before, first = tars_in(tars), stock(tars)
    run("append", tars, tars)
    assert tars_in(tars) == before
    newest = manifest_of(tars)
    assert (newest.number, newest.change) == (2, {"adopted": 2})
    assert newest.classes == ("0", "1", "2", "3", "4")
    assert stock(tars) == first | {"new0": 0, "new1": 4}
    assert stock(tars, f"{tars}@1") == first
    run("verify", tars)
    run("append", tars, tars)
    assert manifest_of(tars).number == 2
    assert "4 tars: a version has them already" in capsys.readouterr().err


def test_tars_that_lie_elsewhere_get_links(tmp_path, tars):
    """After a drop has used a number, links take the next ones; the same tars again are known."""
    run("drop", tars, "train0_1")
    dropped = stock(tars)
    elsewhere = more(tmp_path / "new", 0, far0=1, far1=2).parent
    more(elsewhere, 1, "val", far2=2)
    before = tars_in(elsewhere)
    run("append", elsewhere, tars)
    assert tars_in(elsewhere) == before
    assert stock(tars) == dropped | {"far0": 1, "far1": 2, "far2": 2}
    links = {path.name: path.resolve().name for path in tars.iterdir() if path.is_symlink()}
    assert links == {
        "imagenet-train-000003.tar": "imagenet-train-000000.tar",
        "imagenet-val-000001.tar": "imagenet-val-000001.tar",
    }
    run("append", elsewhere, tars)
    assert manifest_of(tars).number == 3
    run("drop", tars, "far0")
    assert tars_in(elsewhere) == before
    run("verify", tars)


def test_an_append_of_tars_that_is_cut_off_leaves_the_version_and_the_tars(
    tmp_path, tars, monkeypatch
):
    """Before the manifest: other changes wait, --force gives it up and removes only links, the same
    command completes it."""
    inside = more(tars, 2, new0=0)
    outside = more(tmp_path / "new", 5, far0=1)
    before = tars_in(tmp_path)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    def cut_off(source: Path) -> None:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("rackrun.convert.packing.pack.close_folder", interrupted)
            run("append", source, tars)
        assert not list(strangers([*sources_of(str(tars))]))
        with pytest.raises(UsageError, match="another change of it was interrupted"):
            run("drop", tars, "train0_1")

    first = stock(tars)
    cut_off(tars)
    run("append", outside, tars, "--force")
    assert stock(tars) == first | {"far0": 1}
    assert (tars / "imagenet-train-000003.tar").is_symlink()
    cut_off(tars)
    run("append", tars, tars)
    assert stock(tars) == first | {"far0": 1, "new0": 0}
    cut_off(more(tmp_path / "new", 6, far1=1))
    run("drop", tars, "train0_1", "--force")
    assert before.items() <= tars_in(tmp_path).items() and inside.exists()
    run("verify", tars)


def test_no_tar_of_another_program_is_written_over(tars):
    """A tar that came into the folder, and nobody has appended yet, keeps its name and bytes."""
    tar = more(tars, 2, new0=0)
    before = tar.read_bytes()
    run("drop", tars, "train0_1")
    assert tar.read_bytes() == before
    run("append", tars, tars)
    assert "new0" in stock(tars) and "train0_1" not in stock(tars)


def test_a_tar_with_what_was_dropped_is_taken_where_that_is_allowed(tmp_path, tars):
    """--allow dropped takes a key again."""
    first = stock(tars)
    run("drop", tars, "train1_2")
    run("append", more(tmp_path / "new", 0, train1_2=0), tars, "--allow", "dropped")
    assert stock(tars) == first


def test_a_leak_in_new_tars_is_refused(tmp_path, tars):
    """A copy of a validation image does not come into train, and is named."""
    folder = tmp_path / "new"
    folder.mkdir()
    tar = folder / "train-0.tar"
    with tar.open("wb") as file, webdataset.TarWriter(file) as sink:
        sink.write({"__key__": "copy", "jpg": drawn("val0_1"), "cls": 1})
    with pytest.raises(DataError, match=r"exact copies of images in another split.*/copy"):
        run("append", folder, tars)
    assert manifest_of(tars).number == 1
    run("append", folder, tars, "--allow", "leaks")
    assert stock(tars)["copy"] == 1


def test_numbers_of_classes_come_to_names_that_are_there(tmp_path):
    """A number for which there is a name is that class; others are refused."""
    tar = more(tmp_path / "new", 0, x=0)
    by_name(tmp_path / "names")
    main(["index", str(tmp_path / "names"), "--out", str(tmp_path / "named")])
    with pytest.raises(DataError, match="class 2, and there are 2 names"):
        run("append", more(tmp_path / "new", 1, y=2), tmp_path / "named")
    run("append", tar, tmp_path / "named")
    assert labels(tmp_path / "named")["x"] == "oak tree"


@pytest.mark.parametrize(
    ("layout", "suffix"),
    [(by_webdataset, ".cls"), (as_hugging_face, ".json"), (by_name, ".txt")],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_classes_are_changed_where_they_are(tmp_path, layout, suffix):
    """In a .cls, .json or .txt, and nothing else in the tar is: members, their order and bytes."""
    (tmp_path / "tars").mkdir()
    expected, data = layout(tmp_path / "tars"), tmp_path / "data"
    main(["index", str(tmp_path / "tars"), "--out", str(data)])
    (key, *_), classes = expected, manifest_of(data).classes
    new = classes[1 - expected[key]]
    before = contents(data, manifest_of(data))
    run("relabel", data, f"{key}={new}")
    named = {each: classes[label] for each, label in expected.items()}
    assert labels(f"{data}@1") == named and labels(data) == {**named, key: new}
    after = contents(data, manifest_of(data))
    changed = {name for name in after if after[name] != before[name]}
    assert after.keys() == before.keys() and changed == {key + suffix}
    main(["verify", str(data)])


def contents(folder: Path, manifest: Manifest) -> dict[str, bytes]:
    """Return the members of all tars of a version."""
    read = {}
    for shard in (shard for split in manifest.splits for shard in split.shards):
        with tarfile.open(folder / shard.name) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file
                read[member.name] = file.read()
    return read


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("json", b'{"a": [1, {"label": 3}],\n  "label" :1 , "b":"\\u00e9"}\n', b":2 ,"),
        ("json", b' { "label" : "1" }', b'"2"'),
        ("json", b'{"label": "two words", "x": {}}', b'"' + b"n" * 600 + b'"'),
        ("json", b'{"label":1,"label":1}', b'{"label":1,"label":2}'),
        ("txt", b"two words\n", b"n" * 600 + b"\n"),
        ("cls", b"  1", b"  2"),
    ],
)
def test_of_a_member_only_the_class_changes(tmp_path, name, old, new):
    """Numbers stay numbers, text text; blanks, order and other fields stay; a member may grow, and
    the image behind it is found."""
    members = [("a.x", b"1"), (f"a.{name}", old), ("a.jpg", drawn(1)), ("a.y", b"2")]
    write_tar(tmp_path / "tars" / "train-0.tar", members)
    main(["index", str(tmp_path / "tars")])
    source = open_source(str(tmp_path / "tars"))
    (stored,) = shards_of(source)
    row = Row(*stored.rows[0].item())
    classes = ("0", "1", "2") if b"1" in old else ("two words", "n", "n" * 600)
    data = bytes(source.read(stored.shard, 0, row.length))
    changed, written = relabelled(row, data, 2, classes, "label", "here")
    (tmp_path / "one.tar").write_bytes(written + bytes(1024))
    with tarfile.open(tmp_path / "one.tar") as tar:
        read = {each.name: (tar.extractfile(each) or tar.fileobj).read() for each in tar}
    assert [*read] == ["a.x", f"a.{name}", "a.jpg", "a.y"]
    assert new in read[f"a.{name}"]
    if name == "json":
        was, now = json.loads(old), json.loads(read[f"a.{name}"])
        assert str(now.pop("label")) == classes[2] and was.pop("label") is not None and was == now
    image = written[changed.image_offset : changed.image_offset + changed.image_length]
    assert image == drawn(1) == read["a.jpg"]
    assert (changed.length, changed.label) == (len(written), 2)


@pytest.mark.parametrize(
    ("rest", "written"),
    [("\u00e9", '"na\u00efve"'), ("e", '"na\\u00efve"')],
    ids=["as text", "escaped"],
)
def test_a_class_name_is_escaped_where_all_of_the_json_is_ascii(tmp_path, rest, written):
    """Whoever reads an ASCII file as ASCII still can; a file with other letters has them plain."""
    old = f'{{"label": "plain", "note": "{rest}"}}'
    members = [("a.json", old.encode()), ("a.jpg", drawn(1))]
    write_tar(tmp_path / "tars" / "train-0.tar", members)
    main(["index", str(tmp_path / "tars")])
    (stored,) = shards_of(open_source(str(tmp_path / "tars")))
    row = Row(*stored.rows[0].item())
    data = bytes(stored.source.read(stored.shard, 0, row.length))
    _, relabelled_data = relabelled(row, data, 1, ("plain", "na\u00efve"), "label", "here")
    assert old.replace('"plain"', written).encode() in relabelled_data


def test_a_class_in_another_field_is_named(tmp_path):
    """The field that was indexed has to be named again, or another one would be changed."""
    extra = json.dumps({"label": 1, "kind": 0}).encode()
    members = [("a.json", extra), ("a.jpg", drawn(1))]
    members += [("b.json", extra.replace(b"0", b"1")), ("b.jpg", drawn(2))]
    write_tar(tmp_path / "train-0.tar", members)
    main(["index", str(tmp_path), "--label-field", "kind"])
    with pytest.raises(DataError, match="its class is 0, and the tar has 1; .*--label-field NAME"):
        run("relabel", tmp_path, "a=1")
    run("relabel", tmp_path, "a=1", "--label-field", "kind")
    assert contents(tmp_path, manifest_of(tmp_path))["a.json"] == b'{"label": 1, "kind": 1}'


def test_two_splits_may_share_a_key(tmp_path):
    """Other programs number each split from 0: then the shard is a part of a sample's name."""
    for split in ("train", "val"):
        members = []
        for n in range(3):
            members += [(f"{n}.cls", b"%d" % (n % 2)), (f"{n}.jpg", drawn(f"{split}{n}"))]
        write_tar(tmp_path / "tars" / f"{split}-0.tar", members)
    data = tmp_path / "tars"
    main(["index", str(data)])
    with pytest.raises(DataError, match=r"two samples have that key; type one of train-0\.tar/1 "):
        run("drop", data, "1")
    run("drop", data, "val-0.tar/1")
    run("relabel", data, "train-0.tar/2=1")
    assert stored_in(data, "train") == [("0", "0"), ("1", "1"), ("2", "1")]
    assert stored_in(data, "val") == [("0", "0"), ("2", "0")]
    run("squash", data, tmp_path / "plain")
    assert all_keys(tmp_path / "plain") == all_keys(data) == ["0", "0", "1", "2", "2"]


def stored_in(folder: Path, split: str) -> list[tuple[str, str]]:
    """Return key and class of each sample of a split."""
    classes = manifest_of(folder).classes
    samples = everything(open_source(str(folder)), split)
    return sorted((sample.key, classes[sample.label]) for sample in samples)


def all_keys(folder: Path) -> list[str]:
    source = open_source(str(folder))
    return sorted(key for keys in keys_of(shards_of(source), 1).values() for key in keys)


def test_prune_knows_which_tars_are_not_ours(tmp_path, tars):
    """Tars that came in later stay like the first ones; what we have written anew goes."""
    more(tars, 2, new0=0, new1=1)
    run("append", tars, tars)
    theirs = tars_in(tars)
    for key in ("new0", "train0_1", "train0_2"):
        run("drop", tars, key)
    (tmp_path / "runs").mkdir()
    written = tars_in(tars).keys() - theirs.keys()
    main(["prune", str(tars), "--runs", str(tmp_path / "runs"), "--yes"])
    assert theirs.items() <= tars_in(tars).items()
    assert len(tars_in(tars).keys() - theirs.keys()) == len(written) - 1 == 2
    assert [source.manifest.number for source in sources_of(str(tars))] == [5, 2, 1]
    main(["verify", str(tars)])


def test_images_get_a_number_where_tars_have_names(tmp_path, capsys):
    """Class folders may come to such tars; that stock readers will see two forms is said."""
    by_name(tmp_path / "names")
    main(["index", str(tmp_path / "names"), "--out", str(tmp_path / "named")])
    run("append", photos(tmp_path / "more", range(3), ("pine", "yew")), tmp_path / "named")
    assert "other programs will find the class of new images as a number" in capsys.readouterr().err
    assert labels(tmp_path / "named")["yew_1"] == "yew"
