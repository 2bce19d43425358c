"""A source that fails while it is converted never becomes a finished, smaller data set."""

import os
import shutil
import signal
import zipfile
from pathlib import Path

import pytest

from rackrun.convert.readers.directories import Folder
from rackrun.errors import DataError, ReadError
from tests.convert.conftest import shown, wait_for_a_shard
from tests.lab.data import drawn, kaggle, numbered, write_zip
from tests.lab.run import write


def names(*kinds: str, count: int) -> dict[str, str]:
    return {f"{kind}/{number}.jpg": kind for kind in kinds for number in range(count)}


@pytest.mark.security("DATA-6")
def test_a_source_that_goes_away_ends_the_conversion_and_the_same_command_goes_on(
    tmp_path, command
):
    """A mount that vanishes after the first shard: 74 and one line; back again: the same bytes."""
    large = {kind: drawn(kind, (1600, 1200)) for kind in ("cat", "dog")}
    listed = enumerate(names("cat", "dog", count=60).items())
    files = {name: numbered(large[kind], number) for number, (name, kind) in listed}
    source, unmounted = write(tmp_path / "set", files), tmp_path / "away"
    args = ("folder", source, tmp_path / "out", "--shards", 10, "--size", 64, "--workers", 2)
    args += ("--allow", "leaks")
    running = command(*args)
    wait_for_a_shard(tmp_path / "out")
    running.signal_all(signal.SIGSTOP)
    source.rename(unmounted)
    running.signal_all(signal.SIGCONT)
    code, errors = running.end()
    (line,) = (line for line in errors.splitlines() if line.startswith("error: "))
    assert code == 74 and "No such file" in line and "type the same command to continue" in line
    assert not (tmp_path / "out" / "dataset.json").exists()
    shutil.copytree(unmounted, source)
    code, errors = command(*args).end()
    assert code == 0 and "shards are already there" in errors
    assert command(args[0], source, tmp_path / "whole", *args[3:]).end()[0] == 0
    assert shown(tmp_path / "out") == shown(tmp_path / "whole")


def spoilt(path: Path, share: int) -> None:
    """Overwrite the images of a stored zip, but for one in `share`, as a dying disk might."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        for number, info in enumerate(archive.infolist()):
            if number % share:
                start = info.header_offset + 30 + len(info.filename)
                data[start : start + 20] = bytes(20)
    path.write_bytes(data)


def test_what_was_spoilt_is_read_again_once_the_source_is_whole(tmp_path, convert):
    """The same command makes the short shards again, without --force."""
    options = ("--shards", 3)
    source = write_zip(tmp_path / "train.zip", kaggle(30))
    whole = source.read_bytes()
    spoilt(source, 4)
    with pytest.raises(DataError, match="--allow-left-out"):
        convert("catdog", source, *options)
    source.write_bytes(whole)
    out = convert("catdog", source, *options)
    assert shown(out) == shown(convert("catdog", source, *options, out="fresh"))


def test_a_file_that_grew_or_shrank_is_not_read(tmp_path):
    """A source that changes meanwhile is named: 65, and no half image."""
    folder = Folder(write(tmp_path / "set", {"a/0.jpg": drawn(0), "a/1.jpg": drawn(1)}))
    first, second = folder.records()
    with (tmp_path / "set" / first.name).open("ab") as file:
        file.write(b"more")
    (tmp_path / "set" / second.name).unlink()
    with pytest.raises(DataError, match="0.jpg: its size has changed since it was listed"):
        folder.read(first)
    with pytest.raises(ReadError, match="1.jpg: cannot be read: No such file"):
        folder.read(second)
    os.mkfifo(tmp_path / "set" / second.name)
    with pytest.raises(ReadError, match="1.jpg: cannot be read: not a regular file"):
        folder.read(second)
