"""However a conversion ends, no partial file has a final name; the same command resumes it."""

import errno
import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rackrun.convert.__main__ import main
from rackrun.errors import Problem
from tests.convert.conftest import (
    KILLED_AT,
    assert_only_whole_files,
    shown,
    wait_for_a_shard,
)
from tests.lab.data import drawn, kaggle, write_tar, write_zip

SHARDS = 10


@pytest.fixture(scope="module")
def slow_zip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an archive whose conversion takes some seconds if its images are decoded."""
    large = {f"train/{kind}.0.jpg": drawn(kind, (1600, 1200)) for kind in ("cat", "dog")}
    files = {
        f"train/{kind}.{number}.jpg": large[f"train/{kind}.0.jpg"]
        for kind in ("cat", "dog")
        for number in range(60)
    }
    return write_zip(tmp_path_factory.mktemp("slow") / "train.zip", files)


@pytest.fixture
def slow(slow_zip: Path, tmp_path: Path) -> tuple[object, ...]:
    """Return arguments of a conversion that takes some seconds, in small shards."""
    options = ("--shards", SHARDS, "--size", 64, "--workers", 2)
    return ("catdog", slow_zip, tmp_path / "out", *options)


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(moment, marks=[pytest.mark.long] * (moment not in (1, 17, 33)))
        for moment in range(1, 40, 4)
    ],
)
def test_kill_9_at_any_write(moment, tmp_path, convert):
    """Killed before the n-th file is opened or named, the same command still makes every byte."""
    source = write_zip(tmp_path / "train.zip", kaggle(8))
    out, options = tmp_path / "out", ("--shards", 3, "--workers", 2)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_AT, str(moment), "catdog", source, out, *map(str, options)],
        start_new_session=True,
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    if (out / "dataset.json").exists():
        assert moment > 30  # only the last steps come after the manifest
    else:
        assert_only_whole_files(out)
    convert("catdog", source, *options)
    fresh = convert("catdog", source, *options, out="fresh")
    assert shown(out) == shown(fresh)
    assert sorted(path.name for path in out.iterdir() if path.name.startswith(".")) == [".lock"]


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_an_interrupt_leaves_nothing_half_written(number, code, slow, command, tmp_path):
    """Exit code 130 or 143, no partial file, no process left, and Ctrl-C says how to go on."""
    running = command(*slow)
    wait_for_a_shard(tmp_path / "out")
    running.signal_all(number)
    ended, errors = running.end()
    assert ended == code
    assert "Traceback" not in errors
    assert number != signal.SIGINT or "type the same command to continue" in errors
    assert_only_whole_files(tmp_path / "out")
    assert not list((tmp_path / "out").glob(".*.partial"))
    with pytest.raises(ProcessLookupError):
        running.signal_all(signal.SIGTERM)
    assert command(*slow).end()[0] == 0


KILLED = (signal.SIGKILL, "-9, SIGKILL: out of memory", "with a smaller --workers")
CRASHED = (
    signal.SIGSEGV,
    "-11, SIGSEGV: a crash in a library",
    "remove that image from the source",
)


@pytest.mark.parametrize(
    ("reader", "number", "reason", "remedy"),
    [("convert", *CRASHED), ("index", *KILLED), ("verify", *KILLED)],
)
def test_the_image_that_a_worker_died_of_is_named(
    reader, number, reason, remedy, tmp_path, convert, monkeypatch
):
    """A decoder crashes, or eats all memory, at one image: that image and its file are named."""

    def die(*args: object, **options: object) -> None:
        faulthandler.disable()
        os.kill(os.getpid(), number)

    function, expected = {
        "convert": (
            "rackrun.convert.images.treatment.inspect",
            r"-000000\.tar: train/(cat|dog)\.\d\.jpg",
        ),
        "index": ("rackrun.convert.indexing.tar_index.inspect", r"/train\.tar: a/1"),
        "verify": ("rackrun.convert.verify.sample_of", r"-train-000000\.tar: the sample at byte 0"),
    }[reader]
    source = write_zip(tmp_path / "train.zip", kaggle(4))
    if reader == "index":
        write_tar(tmp_path / "train.tar", [("a/1.jpg", drawn("cat", (32, 32))), ("a/1.cls", b"0")])
    elif reader != "convert":
        convert("catdog", source, "--shards", 1)
    monkeypatch.setattr(function, die)
    arguments = {
        "convert": ["catdog", str(source), str(tmp_path / "out")],
        "index": ["index", str(tmp_path / "train.tar")],
    }.get(reader, [reader, str(tmp_path / "out")])
    with pytest.raises(Problem, match=expected + ": a worker process died ") as problem:
        main([*arguments, "--workers", "1"])
    assert reason in str(problem.value) and remedy in str(problem.value)


def test_two_converters_on_one_target(slow, command, tmp_path):
    """The second is refused and names the first, which is unharmed; tasks do not mix in either."""
    first = command(*slow)
    wait_for_a_shard(tmp_path / "out")
    first.signal_all(signal.SIGSTOP)
    for options in (("--force",), ("--task-index", 0, "--task-count", 2)):
        code, errors = command(*slow, *options).end()
        assert code == 64
        assert f"process {first.process.pid} on " in errors and "is writing to it" in errors
    first.signal_all(signal.SIGCONT)
    assert first.end()[0] == 0
    assert command("verify", tmp_path / "out").end()[0] == 0


def test_a_full_disk(command, train_zip, tmp_path):
    """On a file system of 300 kB: exit 74, one line with the room that is left, nothing half."""
    mount = tmp_path / "small"
    mount.mkdir()
    script = (
        f"mount -t tmpfs -o size=300k none {mount} && "
        f'"$@"; code=$?; find {mount} -name "*.tar" -o -name "*.partial" -o -name "*.json"; '
        "exit $code"
    )
    rights = () if os.geteuid() == 0 else ("-r",)
    running = command(
        *("catdog", train_zip, mount / "out", "--shards", 3, "--workers", 1),
        prefix=("unshare", *rights, "-m", "sh", "-c", script, "sh"),
    )
    output, errors = running.process.communicate(timeout=60)
    assert running.process.returncode == 74, errors
    (line,) = (line for line in errors.splitlines() if line.startswith("error"))
    assert os.strerror(errno.ENOSPC) in line and "MB free there" in line
    assert "Traceback" not in errors
    left = [Path(name) for name in output.split()]
    assert not [path for path in left if path.suffix in (".partial", ".json")]
