"""A data set of Hugging Face becomes shards, byte for byte, and nothing is downloaded."""

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from rackrun.errors import DataError, MissingPackage, UsageError
from tests.convert.conftest import manifest_of
from tests.lab.data import drawn, every_sample
from tests.lab.run import write

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
import datasets  # noqa: E402  reads the environment when it is imported

datasets.disable_progress_bars()

IMAGES = [drawn(n, format="PNG" if n % 3 else "JPEG") for n in range(12)]
ZEROS = [0] * 12
TREES = datasets.ClassLabel(names=["oak", "fir"])


def rows(images: list[Any], labels: list[Any], kind: Any = TREES, **more: Any) -> Any:
    """Return a data set with the columns `picture`, `tree`, and more images under other names."""
    stored = [{"bytes": each, "path": None} if isinstance(each, bytes) else each for each in images]
    columns = {"picture": stored, "tree": labels, **dict.fromkeys(more, stored)}
    types = {"picture": datasets.Image(), "tree": kind, **more}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(types))


def saved(folder: Path, data: Any) -> Path:
    """Return a folder that save_to_disk has made."""
    data.save_to_disk(folder)
    return folder


def test_splits_become_splits_and_bytes_stay(tmp_path, convert, capsys):
    """Columns are found by their types; keys are split and row; other splits are left out."""
    data = rows(IMAGES, [n % 2 for n in range(12)])
    parts = {"train": range(6), "validation": range(6, 9), "test": range(9, 11), "extra": [11]}
    splits = {name: data.select(part) for name, part in parts.items()}
    out = convert("hf", saved(tmp_path / "trees", datasets.DatasetDict(splits)))
    samples = {each.key: (each.label, each.image) for each in every_sample(out)}
    assert samples == {
        f"{name}_{index:07d}": (number % 2, IMAGES[number])
        for name, part in parts.items()
        for index, number in enumerate(part)
        if name != "extra"
    }
    manifest = manifest_of(out)
    assert (manifest.dataset, manifest.classes, manifest.report) == ("trees", ("oak", "fir"), {})
    assert [each.name for each in manifest.splits] == ["test", "train", "val"]
    assert "split extra is none of" in capsys.readouterr().err


def test_a_table_without_splits_and_class_names(tmp_path, convert):
    """Parts are held out, 10 comes after 9, the asked columns count, unused names do no harm."""
    data = rows(IMAGES, [9 + n % 2 for n in range(12)], datasets.Value("int64"), b=datasets.Image())
    options = ("--image-column", "b", "--label-column", "tree")
    manifest = manifest_of(convert("hf", saved(tmp_path / "set", data), *options))
    assert manifest.classes == ("9", "10")
    assert [(each.name, each.samples) for each in manifest.splits] == [("train", 10), ("val", 2)]
    used = rows(IMAGES, [n % 2 for n in range(12)], datasets.ClassLabel(names=["a", "b", "c"]))
    out = convert("hf", saved(tmp_path / "used", used), out="out2")
    assert manifest_of(out).classes == ("a", "b", "c")


def test_one_split_of_any_name_is_cut_and_two_need_one_called_train(tmp_path, convert):
    """As far as names tell, the only split is what there is to train on."""
    data = rows(IMAGES, [n % 2 for n in range(12)])
    only = convert("hf", saved(tmp_path / "one", datasets.DatasetDict({"full": data})))
    assert [(each.name, each.samples) for each in manifest_of(only).splits] == [
        ("train", 10),
        ("val", 2),
    ]
    two = saved(tmp_path / "two", datasets.DatasetDict({"first": data, "second": data}))
    with pytest.raises(UsageError, match="no split train in it, only first, second"):
        convert("hf", two, out="out2")


def test_damage_is_counted_and_a_split_without_labels_left_out(tmp_path, convert):
    """Empty, missing, unlabeled and broken images, as from any other source."""
    images = [*IMAGES, b"", None, IMAGES[0], IMAGES[0][:-20]]
    train = rows(images, [*(n % 2 for n in range(14)), -1, 0])
    splits = {"train": train, "test": rows(IMAGES[:2], [-1, -1])}
    out = convert("hf", saved(tmp_path / "set", datasets.DatasetDict(splits)))
    report = {"empty": 1, "no image": 1, "truncated": 1, "unlabeled": 1}
    assert manifest_of(out).report == report
    assert len(every_sample(out)) == 12


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Path]:
    """Make a folder as on the Hub, which `datasets` will prepare in a cache of its own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def made(data: Any) -> Path:
        folder = tmp_path / "forest"
        folder.mkdir()
        parquet.write_table(data.data.table, folder / "train-00000-of-00001.parquet")
        return folder

    return made


def test_parquet_files_are_read_by_way_of_the_cache(convert, published):
    """Once they are prepared there, the name is enough."""
    folder = published(rows(IMAGES, [n % 2 for n in range(12)]))
    first = {each.key: each.image for each in every_sample(convert("hf", folder))}
    assert first == {f"train_{n:07d}": image for n, image in enumerate(IMAGES)}
    again = {each.key: each.image for each in every_sample(convert("hf", Path("forest"), out="b"))}
    assert again == first


def test_images_that_are_paths_lie_below_the_root(tmp_path, convert, published):
    """They are read from --root, never from elsewhere."""
    root = write(tmp_path / "img", {f"{n}.png": each for n, each in enumerate(IMAGES)})
    paths = [{"bytes": None, "path": str(root / f"{n}.png")} for n in range(12)]
    folder = published(rows(paths, [n % 2 for n in range(12)]))
    with pytest.raises(DataError, match=r"train: row 0: .*/0\.png: a file, .* add --root FOLDER"):
        convert("hf", folder)
    with pytest.raises(DataError, match=r"row 0: .*: outside .*; add --root FOLDER"):
        convert("hf", folder, "--root", tmp_path / "elsewhere")
    out = convert("hf", folder, "--root", root)
    assert sorted(each.image for each in every_sample(out)) == sorted(IMAGES)


@pytest.mark.parametrize(
    ("make", "options", "problem", "says"),
    [
        (
            lambda: rows(IMAGES, ["a"] * 12, datasets.Value("string")),
            (),
            UsageError,
            "0 columns of",
        ),
        (lambda: rows(IMAGES, [0] * 12, b=datasets.Image()), (), UsageError, "2 columns of images"),
        (lambda: rows(IMAGES, [0] * 12), ("--label-column", "y"), UsageError, "no column 'y'"),
        (lambda: rows([None] * 9, [0] * 9), (), DataError, "no images in it"),
    ],
)
def test_what_cannot_be_converted_is_named(tmp_path, convert, make, options, problem, says):
    """Columns that are not clear, and a set without images."""
    with pytest.raises(problem, match=says):
        convert("hf", saved(tmp_path / "set", make()), *options)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("data-00000-of-00001.arrow", b""),
        ("state.json", b"[1]"),
        ("dataset_info.json", b'{"features": 7}'),
        ("dataset_info.json", b"{" * 99),
    ],
)
def test_a_damaged_folder_is_one_line(tmp_path, convert, name, text):
    """Whatever stands in its files."""
    folder = saved(tmp_path / "set", rows(IMAGES, [0] * 12))
    (folder / name).write_bytes(text)
    with pytest.raises(UsageError, match="cannot be read as a data set"):
        convert("hf", folder)


def test_nothing_is_downloaded(tmp_path, command, monkeypatch):
    """A name that is not in the cache is refused; the Hub is not asked, whatever the user set."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.setblocking(False)
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")
        code, errors = command("hf", "someone/trees", tmp_path / "out").end()
        assert code == 64
        assert "type: hf download --repo-type dataset someone/trees" in errors
        with pytest.raises(BlockingIOError):
            hub.accept()


def test_without_the_package_the_extra_is_named(tmp_path, convert, monkeypatch):
    """One line that says what to install."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackage, match=r"^datasets is not installed; type: .*\[hf\]'$"):
        convert("hf", tmp_path)


@pytest.mark.parametrize(
    ("named", "card"),
    [
        ("URL", "README.md"),
        ("../outside.parquet", ".huggingface.yaml"),
        ("/outside.parquet", "README.md"),
        ("SPLITS", "README.md"),
    ],
)
def test_a_description_that_names_files_elsewhere_is_refused(tmp_path, convert, named, card):
    """No server is asked for a file, and none is read outside the folder."""
    folder = tmp_path / "set"
    folder.mkdir()
    rows(IMAGES, ZEROS).to_parquet(tmp_path / "outside.parquet")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/train.parquet"
        path = {"URL": url, "/outside.parquet": str(tmp_path / "outside.parquet")}.get(named, named)
        files = f"[{{split: train, path: ['{url}']}}]" if named == "SPLITS" else f"'{path}'"
        text = f"configs:\n- config_name: default\n  data_files: {files}\n"
        fence = "---\n" if card == "README.md" else ""
        (folder / card).write_text(f"{fence}{text}{fence}")
        with pytest.raises(UsageError, match=f"{card}: names '.*', which is not below"):
            convert("hf", folder)
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
