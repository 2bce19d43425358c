"""The cache of a host: whole shards, each fetched once, and damage is always found."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rackrun.errors import UsageError
from rackrun.shards.cache import CachedSource
from rackrun.shards.cache_filler import CacheFiller
from rackrun.shards.folder import FolderSource
from rackrun.shards.http_source import HttpSource
from rackrun.shards.samples import Sample, portions
from tests.lab.data import everything, write_tiny
from tests.lab.servers import Answer
from tests.lab.waiting import until
from tests.shards.conftest import TIMEOUTS, asked_for

FORK = multiprocessing.get_context("fork")


def cached(url: str, folder: Path) -> CachedSource:
    return CachedSource(HttpSource(url, TIMEOUTS), str(folder))


ROOM = 1 << 30  # bytes; without a limit, a disk that is nearly full would decide


def filled(source: CachedSource, limit_bytes: int = ROOM) -> int:
    """Fetch what is missing; return how many bytes were."""
    filler = CacheFiller([source], ["train"], limit_bytes)
    with filler.filling():
        until(lambda: not filler.is_filling)
    return filler.fetched_bytes


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("rackrun-cache-*/*/*.tar"))


def test_a_run_reads_on_while_shards_are_fetched(large, large_proxy, tmp_path):
    """Each shard from here once it is whole, before that from the origin; portions too."""
    source = cached(large_proxy.url, tmp_path)
    filler = CacheFiller([source], ["train"], ROOM)
    with filler.filling():
        while filler.is_filling:
            assert everything(source) == large.all
    assert everything(source) == large.all and filler.missing_bytes() == 0


def by_portions(source: CachedSource) -> list[Sample]:
    """Return every sample as exact epochs read them."""
    shards, rows = source.manifest.split("train").shards, source.index("train")
    requests = [(shard, rows[rows["shard"] == number]) for number, shard in enumerate(shards)]
    return [sample for portion in portions(source, requests) for sample in portion]


@pytest.mark.parametrize("read", [everything, by_portions])
@pytest.mark.parametrize("spoil", [b"", b"noise", None], ids=["empty", "short", "flipped"])
def test_a_file_that_is_damaged_here_is_read_from_the_origin(
    spoil, read, large, large_proxy, tmp_path
):
    """And fetched again by the next run."""
    filled(cached(large_proxy.url, tmp_path))
    path = kept(tmp_path)[0]
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    path.write_bytes(flipped if spoil is None else spoil)
    source = cached(large_proxy.url, tmp_path)
    assert read(source) == large.all
    filled(source)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("requests", [2, 5, 9])
def test_a_process_that_is_killed_leaves_nothing_wrong(large, large_proxy, tmp_path, requests):
    """kill -9 in the middle of a fetch: no file has a name that is not whole, and the next goes
    on."""

    def stop(reply: Answer) -> None:
        if reply.number < requests:
            reply.send()
        else:
            reply.send(body=reply.body[: len(reply.body) // 2])
            reply.stall()

    large_proxy.fault = stop
    child = FORK.Process(target=filled, args=(cached(large_proxy.url, tmp_path),))
    child.start()
    until(lambda: len(large_proxy.requests) > requests)
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    large_proxy.fault = Answer.send
    source = cached(large_proxy.url, tmp_path)
    filled(source)
    large_proxy.requests.clear()
    assert everything(source) == large.all
    assert {name.split()[0] for name in asked_for(large_proxy)} == {"tiny-train.index.npy"}
    assert not [*tmp_path.glob("rackrun-cache-*/*/.*")]


def test_processes_that_start_at_once_fetch_each_shard_once(large, large_proxy, tmp_path):
    """Two runs on a host: one fetches, and both read."""
    source = cached(large_proxy.url, tmp_path)
    with FORK.Pool(3) as pool:
        fetched = pool.map(filled, [source] * 3)
    assert sum(fetched) == sum(path.stat().st_size for path in large.folder.glob("*.tar"))


def test_the_data_set_longest_unused_makes_room(tmp_path, capsys):
    """Never one that is in use: then the rest is read from the origin, and a line says so."""
    sets = [write_tiny(tmp_path / f"set-{n}", shards=1, seed=n) for n in range(3)]
    sources = [CachedSource(FolderSource(str(each.folder)), str(tmp_path / "c")) for each in sets]
    limit = int(2.5 * max(path.stat().st_size for path in tmp_path.glob("set-*/*.tar")))
    for source in sources[:2]:
        assert filled(source, limit)
        time.sleep(0.02)  # so that the times of use differ
    assert filled(sources[2], limit)
    assert [source.shard_folder.exists() for source in sources] == [False, True, True]
    with CacheFiller(sources[1:], ["train"], limit).filling():
        assert not capsys.readouterr().err
        assert filled(sources[0], limit) == 0
    warned = capsys.readouterr().err
    assert "is full" in warned and "is read from" in warned
    assert everything(sources[0]) == sets[0].all


def test_a_tenth_of_the_disk_stays_free(tmp_path, capsys):
    """Of a file system of 1 MB, 0.9 are used; a larger --cache-size than the disk is no failure."""
    tiny = write_tiny(tmp_path / "set", shards=4, samples=10, size=30_000)
    with small_disk(tmp_path / "disk") as disk:
        source = CachedSource(FolderSource(str(tiny.folder)), str(disk))
        assert 0 < filled(source, 0) <= 900_000 and "is full" in capsys.readouterr().err
        assert everything(source) == tiny.all
        filled(source, 10**9)
        assert "No space left on device" in capsys.readouterr().err
        assert everything(source) == tiny.all


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Yield a file system of 1 MB."""
    folder.mkdir()
    assert os.system(f"mount -t tmpfs -o size=1m tmpfs {folder}") == 0
    try:
        yield folder
    finally:
        os.system(f"umount {folder}")


@pytest.mark.security("DATA-7")
def test_a_folder_of_another_account_is_refused(tmp_path):
    """A link, a file, or a folder that others own, in the place of ours."""
    ours = tmp_path / f"rackrun-cache-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir()
    for make in (lambda: ours.symlink_to(tmp_path / "elsewhere"), ours.touch, ours.mkdir):
        make()
        if ours.is_dir() and not ours.is_symlink():
            os.chown(ours, 12345, 12345)
        with pytest.raises(UsageError, match="no place for a cache|not a folder of this account"):
            CachedSource(FolderSource(str(tmp_path)), str(tmp_path))
        ours.rmdir() if ours.is_dir() and not ours.is_symlink() else ours.unlink()
