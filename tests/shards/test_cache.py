"""The node cache: every block is fetched once, and damage is always found."""

import itertools
import logging
import multiprocessing
import os
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rackrun.errors import DataError, UsageError
from rackrun.shards import block_store
from rackrun.shards.block_store import BlockStore
from rackrun.shards.cache import CachedSource
from rackrun.shards.folder import FolderSource
from rackrun.shards.http.source import HttpSource
from rackrun.shards.open import open_source
from rackrun.shards.samples import samples
from rackrun.shards.source import Source
from tests.lab.data import Tiny, everything, write_tiny
from tests.lab.servers import Answer, Proxy
from tests.lab.waiting import until
from tests.shards.conftest import TIMEOUTS, asked_for, files

FORK = multiprocessing.get_context("fork")
PLENTY = 1 << 30


def cached(url: str, folder: Path, limit: int = PLENTY) -> CachedSource:
    return CachedSource(HttpSource(url, TIMEOUTS), str(folder), limit)


def test_the_second_epoch_fetches_nothing(large, large_proxy, tmp_path):
    """Nor does another run: index and blocks are here, and only the manifest is asked for."""
    first = cached(large_proxy.url, tmp_path)
    assert everything(first) == large.all
    fetched = sum(asked_for(large_proxy).values())
    assert first.store.fetched == fetched == 1 + 2 * 3
    assert everything(first) == large.all
    second = cached(large_proxy.url, tmp_path)
    assert everything(second) == large.all
    assert sum(asked_for(large_proxy).values()) == fetched
    assert (second.store.hits, second.store.fetched) == (fetched, 0)


def test_a_source_is_opened_with_its_cache(large, tmp_path):
    """open_source opens caches, too."""
    for _ in range(2):
        source = open_source(str(large.folder), str(tmp_path), PLENTY)
        assert everything(source) == large.all
    assert isinstance(source, CachedSource)
    assert source.store.fetched == 0


def test_processes_that_start_at_once_fetch_each_block_once(large, large_proxy, tmp_path):
    """All ranks and workers of a node together, in whatever order they read."""
    source = cached(large_proxy.url, tmp_path)
    with FORK.Pool(4) as pool:
        counts = pool.map(count_right, [(source, large, seed) for seed in range(4)])
    assert counts == [len(large.all)] * 4
    assert set(asked_for(large_proxy).values()) == {1}


def count_right(work: tuple[Source, Tiny, int]) -> int:
    source, large, seed = work
    numbers = [0, 1]
    random.Random(seed).shuffle(numbers)
    return sum(
        result == expected
        for number in numbers
        for result, expected in zip(
            samples(source, "train", number), large.samples[number], strict=True
        )
    )


def test_ranges_of_any_size_are_cut_out_of_the_blocks(large, tmp_path):
    """Within a piece, across pieces and across blocks, cold and warm; and nothing at all."""
    source = CachedSource(FolderSource(str(large.folder)), str(tmp_path), PLENTY)
    shard = source.manifest.split("train").shards[1]
    data = (large.folder / shard.name).read_bytes()
    dice = random.Random(3)
    for _ in range(60):
        low, high = sorted(dice.randrange(len(data) + 1) for _ in range(2))
        assert source.read(shard, low, high - low) == data[low:high]
    assert source.read(shard, 0, len(data)) == data
    assert source.read(shard, 77, 0) == b""


@pytest.mark.parametrize("requests", range(1, 8))
def test_a_process_that_is_killed_leaves_nothing_wrong(large, large_proxy, tmp_path, requests):
    """kill -9 in the middle of any fetch: the next one goes on from there."""
    stop_at(large_proxy, requests)
    child = FORK.Process(target=everything, args=(cached(large_proxy.url, tmp_path),))
    child.start()
    until(lambda: len(large_proxy.requests) > requests)
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    large_proxy.fault = Answer.send
    source = cached(large_proxy.url, tmp_path)
    assert everything(source) == large.all
    assert source.store.fetched + source.store.hits == 1 + 2 * 3


def stop_at(proxy: Proxy, number: int) -> None:
    """Let the answer to that request and all later ones stop in the middle."""

    def fault(reply: Answer) -> None:
        if reply.number < number:
            reply.send()
        else:
            reply.send(body=reply.body[: len(reply.body) // 2])
            reply.stall()

    proxy.fault = fault


def test_a_spoilt_block_is_fetched_again(large, large_proxy, tmp_path):
    """A flipped bit, a cut, an empty file: whatever a dying disk or a power cut makes of it."""
    everything(cached(large_proxy.url, tmp_path))
    dice = random.Random(5)
    for path in files(tmp_path):
        data = bytearray(path.read_bytes())
        for spoilt in (flipped(data, dice), data[: dice.randrange(len(data))], b""):
            path.write_bytes(spoilt)
            source = cached(large_proxy.url, tmp_path)
            assert everything(source) == large.all
            assert source.store.fetched == 1
    assert len(files(tmp_path)) == 1 + 2 * 3


def flipped(data: bytearray, dice: random.Random) -> bytes:
    other = bytearray(data)
    other[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(other)


def test_a_cache_survives_whatever_a_power_cut_makes_of_it(tmp_path):
    """Every file of it cut anywhere, zeroed from anywhere, exchanged or full of noise, one or all.

    The samples are right at once, from a source that is in order, and nothing is left of it.
    """
    tiny = write_tiny(tmp_path / "shards", samples=4)
    folder = tmp_path / "cache"
    assert read_through(tiny, folder) == 4
    whole = {path: path.read_bytes() for path in [*files(folder), *folder.glob("*/usage")]}
    assert len(whole) == 5
    for spoilt in power_cuts(whole, random.Random(11)):
        for path, data in whole.items():
            path.write_bytes(spoilt.get(path, data))
        changed = [path for path in spoilt if path.name != "usage" and spoilt[path] != whole[path]]
        assert read_through(tiny, folder) == len(changed)
        assert {path: path.read_bytes() for path in files(folder)} == {
            path: whole[path] for path in whole if path.name != "usage"
        }


def read_through(tiny: Tiny, folder: Path) -> int:
    """Read everything, and say how much of it had to be fetched."""
    source = CachedSource(FolderSource(str(tiny.folder)), str(folder), PLENTY)
    assert everything(source) == tiny.all
    return source.store.fetched


def power_cuts(whole: dict[Path, bytes], dice: random.Random) -> Iterator[dict[Path, bytes]]:
    """Yield what some files hold after a power cut instead of what was written."""
    for path, data in whole.items():
        for end in {*range(min(len(data), 20)), *range(0, len(data), 512), len(data) - 1}:
            yield {path: data[:end]}
            yield {path: data[:end] + bytes(len(data) - end)}
        yield {path: data + b"\0"}
        yield {path: dice.randbytes(len(data))}
        yield {path: b"\xff" * len(data)}
    for first, second in itertools.permutations(whole, 2):
        yield {first: whole[second], second: whole[first]}
        yield {first: whole[second]}
    yield {path: bytes(len(data)) for path, data in whole.items()}
    yield {path: data[: len(data) // 2] for path, data in whole.items()}
    yield {path: b"" for path in whole}


def test_a_part_is_verified_by_the_checksums_of_its_pieces(tmp_path):
    """Wherever it lies in a block, which stays where it is."""
    kept, data = BlockStore(tmp_path, PLENTY), random.Random(3).randbytes(400_000)
    obtained(kept, "00block", data)
    for first in range(0, 400_000, 50_000):
        part = slice(first + 1, first + 40_000)
        assert kept.load("00block", len(data), part) == data[part]
    (path,) = (path for path in files(tmp_path) if path.name == "00block")
    stored = bytearray(path.read_bytes())
    stored[-1] ^= 1
    path.write_bytes(stored)
    assert kept.load("00block", len(data), slice(0, 100)) == data[:100]
    assert kept.load("00block", len(data), slice(399_900, 400_000)) is None


@pytest.mark.parametrize("noted", [0, 2**63], ids=["nothing", "more than there is"])
def test_what_is_used_is_counted_anew_where_the_note_is_no_good(tmp_path, monkeypatch, noted):
    """Zeros or noise in `usage`, or a note of before the machine started: the limit holds."""
    kept = BlockStore(tmp_path, 1_000_000)
    for number in range(9):
        obtained(kept, f"{number:02d}block", bytes([number]) * 90_000)
    usage = next(tmp_path.glob("*/usage"))
    usage.write_bytes(noted.to_bytes(8, "little") + bytes(4))
    for number in range(9, 30):
        obtained(kept, f"{number:02d}block", bytes([number]) * 90_000)
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 1_000_000
    assert len(files(tmp_path)) == 10
    usage.write_bytes(block_store._note(0))
    monkeypatch.setattr(block_store, "boot_id", lambda: "that of another start of the machine")
    obtained(kept, "99block", bytes(90_000))
    assert len(files(tmp_path)) <= 11


@pytest.mark.parametrize("kind", ["fifo", "folder", "link"])
def test_what_is_no_file_is_no_block(tiny, tmp_path, kind):
    """Nothing hangs and nothing is followed: such a block is fetched."""
    read_through(tiny, tmp_path)
    block = files(tmp_path)[0]
    block.unlink()
    if kind == "fifo":
        os.mkfifo(block)
    elif kind == "folder":
        block.mkdir()
    else:
        block.symlink_to("/dev/zero")
    assert read_through(tiny, tmp_path) == 1


def test_the_same_bytes_are_the_same_block_and_others_never_are(tmp_path):
    """Data sets of one name do not mix; a copy of one, wherever it is, is not fetched."""
    first, second = (write_tiny(tmp_path / f"{seed}", seed=seed) for seed in (1, 2))
    for tiny in (first, second, first):
        source = CachedSource(FolderSource(str(tiny.folder)), str(tmp_path / "cache"), PLENTY)
        assert everything(source) == tiny.all
    assert source.store.fetched == 0


def test_the_oldest_blocks_go_when_there_is_no_room(tmp_path):
    """The limit holds at any time, and what was used last is still here."""
    kept = BlockStore(tmp_path, 1_000_000)
    for number in range(50):
        key = f"{number:02d}block"
        data = bytes([number]) * 90_000
        assert obtained(kept, key, data) == data
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 1_000_000
        assert obtained(kept, key, b"never asked for", 90_000) == data
    assert [int(path.name[:2]) for path in files(tmp_path)] == list(range(40, 50))
    assert obtained(kept, "99large", bytes(2_000_000)) == bytes(2_000_000)
    assert len(files(tmp_path)) == 10


def obtained(kept: BlockStore, key: str, data: bytes, length: int | None = None) -> bytes:
    length = len(data) if length is None else length
    return bytes(kept.get_or_fetch(key, length, slice(None), lambda: data, lambda _: True))


def test_wrong_bytes_are_not_kept(large, large_proxy, tmp_path):
    """A server that heals is believed again; a lie is not repeated by the cache."""
    source = cached(large_proxy.url, tmp_path)
    source.index("train")
    large_proxy.fault = lambda reply: reply.send(body=bytes(len(reply.body)))
    with pytest.raises(DataError, match="is damaged"):
        everything(source)
    large_proxy.fault = Answer.send
    assert everything(source) == large.all


def test_damage_between_the_samples_is_not_kept_either(fresh, tmp_path):
    """The digest of the whole shard sees the padding, and the shard is forgotten."""
    source = CachedSource(FolderSource(str(fresh.folder)), str(tmp_path), PLENTY)
    path = fresh.folder / source.manifest.split("train").shards[0].name
    right = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(right[:-1] + b"x")
    with pytest.raises(DataError, match="SHA-256"):
        everything(source)
    path.write_bytes(right)
    assert everything(source) == fresh.all


def test_a_full_disk_costs_the_cache_and_not_the_run(large, tmp_path, caplog):
    """What cannot be kept is fetched each time, and that is said once."""
    source = CachedSource(FolderSource(str(large.folder)), str(tmp_path), PLENTY)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with caplog.at_level(logging.WARNING):
            assert everything(source) == large.all
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "no help as a cache: File too large"
    ]
    assert everything(source) == large.all
    assert len(files(tmp_path)) >= 2 * 3


def test_a_process_that_is_stuck_with_a_block_does_not_hold_up_others(
    tmp_path, monkeypatch, caplog
):
    """After a while the block is fetched without it."""
    monkeypatch.setattr(block_store, "STUCK_SECONDS", 0.1)
    kept = BlockStore(tmp_path, PLENTY)
    (tmp_path / f"rackrun-cache-{os.getuid()}" / "aa").mkdir()
    stuck = block_store._locked(kept._path("aablock.partial"))
    assert obtained(kept, "aablock", b"bytes") == b"bytes"
    assert "another process is stuck" in caplog.text
    os.close(stuck)


def test_a_place_that_is_not_ours_is_refused(tmp_path):
    """A planted link, or a path where no folder can be made."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"rackrun-cache-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="not a folder of this account"):
        BlockStore(tmp_path, PLENTY)
    with pytest.raises(UsageError, match="no place for a cache"):
        BlockStore(Path("/dev/null/cache"), PLENTY)
