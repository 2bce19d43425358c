"""A table of paths and labels becomes a data set; nothing outside its folder is read."""

import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rackrun.errors import DataError, MissingPackage, UsageError
from tests.convert.conftest import manifest_of
from tests.lab.data import drawn, every_sample
from tests.lab.run import write

FILES = {f"img/{n}.jpg": drawn(n) for n in range(12)}
ROWS = [
    (f"img/{n}.jpg", ("oak", "fir")[n % 2], ("train", "Valid", "test")[n % 3]) for n in range(12)
]


def as_parquet(folder: Path, rows: list[tuple[str, ...]]) -> Path:
    path, names = folder / "trees.parquet", ("path", "label", "split")
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_rows_become_samples(tmp_path, convert):
    """Images, labels and splits are those of the Parquet file."""
    out = convert("csv", as_parquet(write(tmp_path, FILES), ROWS))
    manifest = manifest_of(out)
    assert (manifest.dataset, manifest.classes) == ("trees", ("fir", "oak"))
    assert [(each.name, each.samples) for each in manifest.splits] == [
        *(("test", 4), ("train", 4), ("val", 4))
    ]
    classes = manifest.classes
    samples = {each.key: (classes[each.label], each.image) for each in every_sample(out)}
    assert samples == {f"img_{n}": (ROWS[n][1], FILES[f"img/{n}.jpg"]) for n in range(12)}


def test_parquet_without_pyarrow_names_the_extra(tmp_path, convert, monkeypatch):
    """One line that says what to install."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackage, match=r"^pyarrow is not installed; type: .*\[parquet\]'$"):
        convert("csv", as_parquet(tmp_path, ROWS))


@pytest.mark.parametrize("name", ["trees.csv", "trees.parquet"])
def test_a_table_that_is_not_there_is_named(tmp_path, convert, name):
    """In plain words, not in those of the operating system."""
    with pytest.raises(UsageError, match=f"{name}: there is no such file$"):
        convert("csv", tmp_path / name)


def test_all_missing_files_are_named_and_can_be_left_out(tmp_path, convert):
    """At once, with their lines, also after a cell with a line break in it."""
    folder = write(tmp_path / "set", FILES)
    lines = [f"img/{n}.jpg,{('oak', 'fir')[n % 2]},x\n" for n in range(14)]
    lines[0] = lines[0].replace(",x", ',"two\nlines"')
    (folder / "trees.csv").write_text("path,label,note\n" + "".join(lines))
    says = "2 files of it: there is no such file in .*: line 15: img/12.jpg, line 16: img/13.jpg; "
    with pytest.raises(DataError, match=f"{says}.*--allow-left-out 2"):
        convert("csv", folder / "trees.csv")
    out = convert("csv", folder / "trees.csv", "--allow-left-out", 2)
    assert manifest_of(out).report == {"missing": 2}
    assert len(every_sample(out)) == 12


def test_rows_of_one_group_stay_on_one_side(tmp_path, convert):
    """Images of a patient are all in train or all in val."""
    folder = write(tmp_path / "set", FILES)
    rows = [f"img/{n}.jpg,{('oak', 'fir')[n % 2]},patient{n // 3}\n" for n in range(12)]
    (folder / "trees.csv").write_text("path,label,patient\n" + "".join(rows))
    out = convert("csv", folder / "trees.csv", "--group-column", "patient", "--val-percent", 25)
    manifest = manifest_of(out)
    assert [(each.name, each.samples) for each in manifest.splits] == [("train", 9), ("val", 3)]
    val = {int(each.key[4:]) // 3 for each in every_sample(out)[9:]}
    assert len(val) == 1
