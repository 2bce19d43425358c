"""Archives of drawn images are reproducible and whole, whatever happens to who draws them."""

import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from rackrun.catdog.archive import drawn, write_archive
from rackrun.catdog.drawing import jpeg
from rackrun.errors import Problem, SaveError

PROJECT = Path(__file__).parents[2]


def test_an_archive_has_the_layout_of_kaggle(tmp_path):
    """train/cat.0.jpg, train/dog.0.jpg and so on, as many of one kind as of the other."""
    write_archive(tmp_path / "train.zip", 20, seed=3)
    with ZipFile(tmp_path / "train.zip") as archive:
        names = set(archive.namelist())
        assert archive.testzip() is None
        assert archive.read("train/dog.4.jpg") == jpeg("dog", 3, 4)
    expected = {f"train/{kind}.{number}.jpg" for kind in ("cat", "dog") for number in range(10)}
    assert names == expected
    assert [path.name for path in tmp_path.iterdir()] == ["train.zip"]
    assert len({jpeg("dog", 3, 4), jpeg("cat", 3, 4), jpeg("dog", 2, 4), jpeg("dog", 3, 3)}) == 4


def test_the_number_of_processes_changes_nothing():
    """One process draws the same images in the same order as three."""
    assert list(drawn(14, processes=1)) == list(drawn(14, processes=3))


def test_a_full_disk_is_named(tmp_path):
    """An archive that does not fit is a SaveError that names it, and nothing is left of it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(SaveError, match=r"train\.zip: cannot be written"):
            write_archive(tmp_path / "train.zip", 40)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_a_lost_process_is_named():
    """A drawing process that is killed is a Problem with one line, not a hang."""
    images = drawn(100_000, processes=1)
    next(images)
    (process,) = drawing_processes(os.getpid())
    os.kill(process, signal.SIGKILL)
    with pytest.raises(Problem, match="ended from outside"):
        list(images)


def test_drawing_ends_with_its_reader():
    """After kill -9 of the command no process goes on drawing."""
    code = "from rackrun.catdog.archive import drawn\nfor _ in drawn(10**6, processes=2): print(1)"
    command = [sys.executable, "-uc", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=PROJECT) as parent:
        assert parent.stdout
        parent.stdout.readline()
        handles = [os.pidfd_open(process) for process in drawing_processes(parent.pid)]
        parent.kill()
    assert len(handles) == 2
    for handle in handles:
        wait_for_end(handle)


def children(parent: int) -> list[int]:
    """Return the processes whose parent this is, as Linux sees it."""
    processes = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(child) for tasks in processes for child in tasks.read_text().split()]


def drawing_processes(parent: int) -> list[int]:
    """Return those children that draw: multiprocessing has a helper of its own besides."""
    return [child for child in children(parent) if "spawn_main" in command_line(child)]


def command_line(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_text()


def wait_for_end(handle: int) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    assert poll.poll(60_000), "a process went on drawing"
    os.close(handle)
