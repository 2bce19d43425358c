"""What comes out of a shard folder is what went in, or an error that names the place."""

import fcntl
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from rackrun.atomic import partial_path
from rackrun.convert.commands import COMMANDS
from rackrun.errors import DataError
from rackrun.shards import host_folder
from rackrun.shards.open import open_source
from rackrun.shards.source import Source
from tests.lab.data import everything


def test_ranges_are_exact(tiny):
    """A range is exactly what was asked for, or an error."""
    source = open_source(str(tiny.folder))
    shard = source.manifest.split("train").shards[0]
    data = (tiny.folder / shard.name).read_bytes()
    assert source.read(shard, 700, 1500) == data[700:2200]
    assert source.read(shard, 5, 0) == b""
    with pytest.raises(DataError, match=f"{shard.name}: ends at byte {len(data)}"):
        source.read(shard, len(data) - 10, 11)


def test_a_source_travels_to_other_processes_with_its_version(fresh):
    """Pickled, it reads the same on the other side, also if the folder has a newer version."""
    source = open_source(str(fresh.folder))
    source.index("train")
    pickled = pickle.dumps(source)
    (fresh.folder / "dataset.json").write_text("a newer version")
    assert everything(pickle.loads(pickled)) == fresh.all


@pytest.mark.parametrize("where", ["folder", "server"])
def test_the_processes_of_a_host_have_one_copy_of_an_index(tiny, server, where):
    """They map one file, which is fetched once."""
    source = open_source(str(tiny.folder) if where == "folder" else server.url)
    memory = _memory_of(source.index("train"))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(_memory_of_train, [source, source]) == [memory, memory]
    assert memory not in ("", "0")


def test_an_index_that_is_damaged_on_this_host_is_fetched_again(server):
    """It is told by its digest, like any other."""
    whole = open_source(server.url).index("train").copy()
    (kept,) = Path(tempfile.gettempdir()).glob("rackrun-cache-*/*.npy")
    for damage in (b"", kept.read_bytes()[:-1] + b"x"):
        kept.write_bytes(damage)
        assert np.array_equal(open_source(server.url).index("train"), whole)


def test_an_index_that_cannot_be_kept_is_read_all_the_same(tiny, server, monkeypatch, tmp_path):
    """As where all is read-only."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    assert everything(open_source(server.url)) == tiny.all


def test_an_index_does_not_wait_for_ever_for_another_process(tiny, server, monkeypatch, tmp_path):
    """One that is stopped, or whose server is slow, holds the lock; a kill leaves a part."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(host_folder, "WAIT_SECONDS", 0.1)
    folder = host_folder.own_folder(tmp_path)
    folder.chmod(0o777)
    left = partial_path(folder / "old.npy")
    left.touch()
    os.utime(left, (0, 0))
    other = os.open(folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert everything(open_source(server.url)) == tiny.all
    os.close(other)
    assert not left.exists() and list(folder.glob("*.npy"))
    assert folder.stat().st_mode & 0o777 == 0o700


def _memory_of_train(source: Source) -> str:
    return _memory_of(source.index("train"))


def _memory_of(index: np.ndarray) -> str:
    """Return the inode of the file that an array is a view of."""
    address = index.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return line.split()[4]
    return ""


def test_torch_is_not_needed():
    """The head node reads, writes and converts shards without a GPU stack."""
    modules = {
        "rackrun.shards.source",
        "rackrun.shards.writer",
        *(f"rackrun.convert.{one.module}" for one in COMMANDS.values()),
    }
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"torch", "PIL", "rich"} & set(loaded.stdout.split())
