"""The demo set: one command, whatever has been done already."""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from rackrun.shards.open import open_source
from tests.lab import warm
from tests.lab.waiting import until

PROJECT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "rackrun.catdog", "demo"]
FEW = ["--images", "20"]


def demo(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command, and return it when it has ended."""
    return warm.run(*COMMAND[1:], *args, cwd=PROJECT)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small demo set."""
    out = tmp_path_factory.mktemp("demo")
    assert demo(out, *FEW).returncode == 0
    return out


def test_the_set_is_drawn_and_converted(tmp_path):
    """One command leaves train.zip and finished shards of both classes, and shows what it ran."""
    done = demo(tmp_path / "new" / "data", *FEW)
    out = tmp_path / "new" / "data"
    assert done.returncode == 0
    assert f"$ ./run-local convert catdog {out}/train.zip {out}/shards" in done.stdout
    assert len(ZipFile(out / "train.zip").namelist()) == 20
    manifest = open_source(str(out / "shards")).manifest
    assert manifest.classes == ("cat", "dog")
    assert sum(split.samples for split in manifest.splits) == 20


def test_what_is_missing_is_made(made, tmp_path):
    """With the images drawn but not converted, nothing is drawn again."""
    (tmp_path / "train.zip").write_bytes((made / "train.zip").read_bytes())
    done = demo(tmp_path, *FEW)
    assert done.returncode == 0
    assert "drew" not in done.stdout
    manifest = tmp_path / "shards" / "dataset.json"
    assert manifest.read_bytes() == (made / "shards" / "dataset.json").read_bytes()


def test_after_a_kill_the_set_is_made(made, tmp_path):
    """kill -9 leaves no archive under its name; the next attempt makes the same one."""
    with subprocess.Popen([*COMMAND, str(tmp_path), "--images", "20000"], cwd=PROJECT) as running:
        until(lambda: partial(tmp_path))
        running.kill()
    assert not (tmp_path / "train.zip").exists()
    assert demo(tmp_path, *FEW).returncode == 0
    assert (tmp_path / "train.zip").read_bytes() == (made / "train.zip").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "shards", "train.zip"]


def test_two_at_once_make_one_set(made, tmp_path):
    """The second one waits for the first and finds everything there."""
    command = [*COMMAND, str(tmp_path), *FEW]
    both = [subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE) for _ in range(2)]
    outputs = [process.communicate()[0].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("drew 20" in text for text in outputs) == 1
    assert (tmp_path / "train.zip").read_bytes() == (made / "train.zip").read_bytes()


def partial(folder: Path) -> list[Path]:
    """Return an archive that is being written."""
    return [path for path in folder.iterdir() if path.name.startswith(".train")]
