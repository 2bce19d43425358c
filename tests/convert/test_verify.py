"""verify reads everything again and names what is wrong; summary says what is there."""

import json
from pathlib import Path

import pytest

from rackrun.convert.__main__ import main
from tests.convert.conftest import Convert
from tests.lab.data import kaggle, write_zip


@pytest.fixture
def folder(tmp_path: Path, convert: Convert) -> Path:
    """Return three training shards and one of validation."""
    source = write_zip(tmp_path / "train.zip", kaggle(20))
    return convert("catdog", source, "--shards", 3)


def test_a_whole_folder_passes(folder, capsys):
    """Nothing is wrong: one line with the counts, or the same for programs."""
    main(["verify", str(folder)])
    assert "40 samples in 4 shards, all correct" in capsys.readouterr().out
    main(["verify", str(folder), "--json"])
    counted = {"location": str(folder), "version": 1, "samples": 40, "shards": 4}
    assert json.loads(capsys.readouterr().out) == {**counted, "faults": [], "copies": []}


def test_the_summary(folder, capsys):
    """Shards in brace form, counts, bytes and classes on one page."""
    main(["summary", str(folder)])
    printed = capsys.readouterr().out
    assert "catdog: 2 classes, original bytes" in printed
    assert "catdog-train-{000000..000002}.tar" in printed
    assert "catdog-val-000000.tar" in printed
    assert "36 samples, " in printed and "cat 18, dog 18" in printed and "cat 2, dog 2" in printed
    size = sum(path.stat().st_size for path in folder.glob("catdog-train-*.tar"))
    assert f"{size:,} bytes in 3 shards of 12" in printed
