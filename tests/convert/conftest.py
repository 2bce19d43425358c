"""Fixtures of the tests of conversion: an archive, and ways to run the command."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rackrun.convert.__main__ import main
from rackrun.shards.open import open_source
from rackrun.shards.samples import Sample
from tests.lab import warm
from tests.lab.drawn import kaggle, write_zip
from tests.lab.tiny_shards import everything as samples_of

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


def everything(folder: Path) -> list[Sample]:
    """Return every sample of a shard folder, all verified, in order of splits and shards."""
    source = open_source(str(folder))
    return [sample for split in source.manifest.splits for sample in samples_of(source, split.name)]


def shown(folder: Path) -> dict[str, bytes]:
    """Return the files that a conversion has made, hidden ones left out, with their bytes."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if not path.name.startswith(".")
    }
