"""A run stays on the version of its data."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rackrun.catdog.model import TASK
from rackrun.contract.variables import NOTE_ROWS
from rackrun.convert.__main__ import main as convert
from rackrun.errors import UsageError
from rackrun.shards.open import open_source
from rackrun.training import train as loop
from rackrun.training.data.open import open_data
from rackrun.training.run.data_version import chosen
from tests.lab.oracles import exact_epochs
from tests.training.conftest import draw, settings

NEW = ("disc", "zigzag")


@pytest.fixture
def data(shapes: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shapes, tmp_path / "data"))


def append(data: Path, tmp_path: Path) -> None:
    """Append 30 images of a class that is there and 30 of one that is not."""
    for label, name in enumerate(NEW):
        (tmp_path / "new" / name).mkdir(parents=True)
        for number in range(30):
            image = draw(2 * label, seed=50_000 + 100 * label + number)
            (tmp_path / "new" / name / f"{number}.jpg").write_bytes(image)
    convert(["append", str(tmp_path / "new"), str(data), "--workers", "1"])


def run(data: Path | str, folder: Path, **options: Any) -> dict[str, Any]:
    """Train, and return what config.json has."""
    options = {"exact_epochs": True, "ema_decay": 0.9} | options
    assert loop.run(TASK, settings(Path(data), folder, **options)) == 0
    recorded: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return recorded


def test_a_resumed_run_stays_on_its_version(data, tmp_path, capsys, monkeypatch):
    """An append behind its back changes nothing: same data, exact epochs, and a line says so."""
    monkeypatch.setenv(NOTE_ROWS, "1")
    first = run(data, tmp_path / "first", epochs=2)
    append(data, tmp_path)
    capsys.readouterr()
    again = run(data, tmp_path / "again", epochs=3, resume=str(tmp_path / "first"))
    output = capsys.readouterr().out
    assert f"stays on version 1 of {data}; to train on version 2, start a run" in output
    digest = open_source(f"{data}@1").manifest.digest
    assert again["data_sha256"] == first["data_sha256"] == digest
    assert again["data_versions"] == {f"{data}@1": digest}
    assert exact_epochs(tmp_path / "first", tmp_path / "again") == [[1], [1], [1]]


def test_another_version_is_refused(data, tmp_path):
    """A typed version that is not the run's is no slip that goes unnoticed."""
    recorded = open_source(str(data)).manifest.digest
    append(data, tmp_path)
    assert chosen(str(data), recorded)[0] == f"{data}@1"
    assert chosen(f"{data}@1", recorded)[0] == f"{data}@1"
    with pytest.raises(UsageError, match=f"is on version 1; .* type --data {data}@1, or .*weights"):
        chosen(f"{data}@2", recorded)
    second = open_source(str(data)).manifest.digest
    with pytest.raises(UsageError, match=rf"is on version 2; to continue, type --data {data}@2"):
        chosen(f"{data}@1", second)
    with pytest.raises(UsageError, match="no version 3; the newest is 2"):
        chosen(f"{data}@3", recorded)


def test_the_first_append_while_ranks_open_the_folder_changes_nothing(data, tmp_path, monkeypatch):
    """A folder of one version is pinned, too: a rank that opens it after an append reads that."""
    first = open_source(str(data)).manifest

    def late(*args: Any) -> Any:
        append(data, tmp_path)
        return open_data(*args)

    monkeypatch.setattr("rackrun.training.setup.open_data", late)
    recorded = run(data, tmp_path / "first", epochs=1)
    assert open_source(str(data)).manifest.number == 2
    assert recorded["data_versions"] == {f"{data}@1": first.digest}
    assert recorded["resolved"]["images"] == first.split("train").samples
