"""What comes out of a shard folder is what went in, or an error that names the place."""

import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rackrun.convert.commands import COMMANDS
from rackrun.errors import DataError, Problem
from rackrun.shards.open import open_source
from rackrun.shards.samples import samples
from rackrun.shards.source import Source
from tests.lab.data import everything

ANY_FIXTURE = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
FIRST = "tiny-train-000000.tar"


def test_samples_come_back_in_order(tiny):
    """Key, label, extension and every byte."""
    assert everything(open_source(str(tiny.folder))) == tiny.all


@ANY_FIXTURE
@given(position=st.integers(0, 10**9), bit=st.integers(0, 7))
@pytest.mark.security("DATA-4")
def test_no_flipped_bit_gets_through(position, bit, fresh):
    """DATA-4: whichever bit of a shard flips, in a header, a label, an image or the padding."""
    path = fresh.folder / FIRST
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[position % len(whole)] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        with pytest.raises(DataError, match=FIRST):
            everything(open_source(str(fresh.folder)))
    finally:
        path.write_bytes(whole)


@ANY_FIXTURE
@given(length=st.integers(0, 10**9))
def test_no_cut_gets_through(length, fresh):
    """A shard cut anywhere, at the border of two samples too, is found."""
    path = fresh.folder / FIRST
    whole = path.read_bytes()
    path.write_bytes(whole[: length % len(whole)])
    try:
        with pytest.raises(DataError, match=FIRST):
            everything(open_source(str(fresh.folder)))
    finally:
        path.write_bytes(whole)


def test_ranges_are_exact(tiny):
    """A range is exactly what was asked for, or an error."""
    source = open_source(str(tiny.folder))
    shard = source.manifest.split("train").shards[0]
    data = (tiny.folder / shard.name).read_bytes()
    assert source.read(shard, 700, 1500) == data[700:2200]
    assert source.read(shard, 5, 0) == b""
    with pytest.raises(DataError, match=f"{shard.name}: ends at byte {len(data)}"):
        source.read(shard, len(data) - 10, 11)


def test_a_source_travels_to_other_processes(tiny):
    """Pickled, it is a few bytes, and it reads the same on the other side."""
    source = open_source(str(tiny.folder))
    source.index("train")
    pickled = pickle.dumps(source)
    assert len(pickled) < 300
    assert list(samples(pickle.loads(pickled), "train", 0)) == tiny.samples[0]


def test_what_a_source_knows_is_shared_with_the_processes_it_is_given_to(tiny):
    """They find manifest and index in the same memory, though the folder has gone meanwhile."""
    source = open_source(str(tiny.folder))
    whole = source.index("train").copy()
    processes = multiprocessing.get_context("spawn")
    replies = processes.SimpleQueue()
    child = processes.Process(target=_tell_what_is_known, args=(source, replies))
    shutil.move(tiny.folder, tiny.folder.with_name("moved"))
    try:
        child.start()
        classes, index, memory = replies.get()
        child.join()
        assert (classes, memory) == (source.manifest.classes, _memory_of(source.index("train")))
        assert np.array_equal(index, whole) and np.array_equal(source.index("train"), whole)
    finally:
        shutil.move(tiny.folder.with_name("moved"), tiny.folder)


def test_ranks_of_a_node_have_one_index(tiny):
    """It is borrowed by process and descriptor, and lent on; another file there is no index."""
    lender, borrower, other = (open_source(str(tiny.folder)) for _ in range(3))
    loan = lender.lend_index("train")
    assert borrower.borrow_index("train", loan)
    memory = _memory_of(borrower.index("train"))
    assert memory == _memory_of(lender.index("train"))
    assert borrower.lend_index("train")[2:] == loan[2:]
    process, descriptor, device, inode = loan
    with Path(os.devnull).open() as file:
        for wrong in (
            (process, file.fileno(), device, inode),
            (process, descriptor, device, inode + 1),
            (2**22 + 1, descriptor, device, inode),  # beyond the kernel's largest process id
        ):
            assert not other.borrow_index("train", wrong)
    assert np.array_equal(other.index("train"), borrower.index("train"))
    assert _memory_of(other.index("train")) != memory


def _tell_what_is_known(source: Source, answers: "SimpleQueue[object]") -> None:
    index = source.index("train")
    answers.put((source.manifest.classes, index.copy(), _memory_of(index)))


def _memory_of(index: np.ndarray) -> str:
    """Return the inode of the file that an array is a view of."""
    address = index.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return line.split()[4]
    return ""


def test_a_split_that_is_not_there_is_named(tiny):
    """With those that are."""
    with pytest.raises(DataError, match="no split 'test', only train"):
        open_source(str(tiny.folder)).index("test")


@pytest.mark.parametrize("ended", ["tiny-train.index.npy", FIRST])
def test_a_missing_file_is_a_data_error(ended, fresh):
    """A file that the manifest promises and that is not there is named."""
    (fresh.folder / ended).unlink()
    with pytest.raises(DataError, match=f"{ended}: cannot be read: No such file") as problem:
        everything(open_source(str(fresh.folder)))
    assert isinstance(problem.value, Problem) and problem.value.exit_code == 65


def test_torch_is_not_needed():
    """The head node reads, writes and converts shards without a GPU stack."""
    modules = {
        "rackrun.shards.source",
        "rackrun.shards.writer",
        *(one.module for one in COMMANDS.values()),
    }
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"torch", "numpy", "PIL", "rich"} & set(loaded.stdout.split())
