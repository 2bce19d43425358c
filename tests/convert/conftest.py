"""Fixtures of the tests of conversion: an archive, and ways to run the command."""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rackrun.convert.__main__ import main
from rackrun.shards.index import Manifest
from rackrun.shards.open import open_source
from tests.lab import warm
from tests.lab.data import drawn, every_sample, kaggle, write_zip
from tests.lab.run import write
from tests.lab.waiting import until

Convert = Callable[..., Path]


@pytest.fixture(scope="session")
def train_zip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return Kaggle's archive with 150 cats and 150 dogs."""
    return write_zip(tmp_path_factory.mktemp("kaggle") / "train.zip", kaggle(150))


@pytest.fixture
def convert(tmp_path: Path) -> Convert:
    """Return a function that converts in this process and returns the folder."""

    def run(command: str, source: Path, *options: object, out: str = "out") -> Path:
        main([command, str(source), str(tmp_path / out), *map(str, options)])
        return tmp_path / out

    return run


@dataclass
class Command:
    """A command that runs by itself, in a process group of its own."""

    process: subprocess.Popen[str]

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and everything on standard error."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to it and to all its workers, as a terminal would."""
        os.killpg(self.process.pid, number)


@pytest.fixture
def command() -> Callable[..., Command]:
    """Return a function that starts `python -m rackrun.convert` with these arguments."""

    def start(*args: object, prefix: tuple[str, ...] = ()) -> Command:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        options = {"stdin": subprocess.DEVNULL, **streams, "start_new_session": True}
        arguments = ("-m", "rackrun.convert", *map(str, args))
        if prefix:  # another program starts it
            argv = [*prefix, sys.executable, *arguments]
            return Command(subprocess.Popen(argv, text=True, **options))
        return Command(warm.Python(*arguments, **options))

    return start


def shown(folder: Path) -> dict[str, bytes]:
    """Return the files that a conversion has made, hidden ones left out, with their bytes."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if not path.name.startswith(".")
    }


CLASSES = ("cat", "dog")


FEW = ("--shards", 4, "--workers", 1)


def photos(folder: Path, numbers: range, classes: tuple[str, ...] = CLASSES) -> Path:
    """Write images of each class into a folder of class folders."""
    files = {f"{kind}/{n}.jpg": drawn(f"{kind} {n}") for kind in classes for n in numbers}
    return write(folder, files)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with photos/, 24 cats and 24 dogs, and data/, their shards."""
    folder = tmp_path_factory.mktemp("converted")
    main(
        ["folder", str(photos(folder / "photos", range(24))), str(folder / "data"), *map(str, FEW)]
    )
    return folder


@pytest.fixture
def data(tmp_path: Path, converted: Path) -> Path:
    """Return a copy of data/, beside one of photos/."""
    shutil.copytree(converted, tmp_path, dirs_exist_ok=True)
    return tmp_path / "data"


def run(*args: object) -> None:
    workers = () if args[0] in ("drop", "relabel") else ("--workers", "1")
    main([*map(str, args), *workers])


def manifest_of(location: Path | str) -> Manifest:
    return open_source(str(location)).manifest


def labels(location: Path | str) -> dict[str, str]:
    """Return the class of each sample by its key; each of them is verified."""
    classes = manifest_of(location).classes
    return {sample.key: classes[sample.label] for sample in every_sample(location)}


def numbers(location: Path | str) -> dict[str, int]:
    """Return the number of the class of each sample by its key; each of them is verified."""
    return {sample.key: sample.label for sample in every_sample(location)}


def wait_for_a_shard(folder: Path) -> None:
    until(lambda: list(folder.glob(".converting/*.done")), "a shard is complete", 60)


KILLED_AT = """
import mmap, os, signal, sys
counter, wanted = mmap.mmap(-1, 8), int(sys.argv.pop(1))

def count(event, args):
    if event == "os.rename" or event == "open" and isinstance(args[2], int) and args[2] & 3:
        seen = int.from_bytes(counter[:8], "little") + 1
        counter[:8] = seen.to_bytes(8, "little")
        if seen == wanted:
            os.killpg(0, signal.SIGKILL)

sys.addaudithook(count)
from rackrun.convert.__main__ import main
main(sys.argv[1:])
"""


def assert_only_whole_files(folder: Path) -> None:
    """Check that every tar is whole to its end marker, and that there is no manifest."""
    assert not (folder / "dataset.json").exists()
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            assert len(tar.getnames()) == 2 * (len(tar.getnames()) // 2) > 0
        assert path.read_bytes().endswith(bytes(1024))
