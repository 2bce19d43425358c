"""Damaged samples as values, for readers that go on without them and count."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rackrun.errors import DataError, Unavailable
from rackrun.nginx.serve import serving
from rackrun.nginx.site import Site
from rackrun.shards.cache import CachedSource
from rackrun.shards.folder import FolderSource
from rackrun.shards.http_source import HttpSource
from rackrun.shards.samples import Sample, portions, samples
from rackrun.shards.source import Source
from tests.lab.data import Tiny
from tests.shards.conftest import SHORT, always, status


@pytest.fixture(params=["folder", "http", "cache"])
def opened(request: pytest.FixtureRequest, fresh: Tiny, tmp_path: Path) -> Iterator[Source]:
    """Yield the folder that may be changed, opened in each possible way."""
    if request.param == "folder":
        yield FolderSource(str(fresh.folder))
        return
    with serving(Site(fresh.folder, port=0, native=True)) as server:
        source = HttpSource(server.url)
        yield source if request.param == "http" else CachedSource(source, str(tmp_path))


def damage(tiny: Tiny, shard: int, samples: list[int]) -> None:
    """Flip a bit in the images of these samples of a shard."""
    path = sorted(tiny.folder.glob("*.tar"))[shard]
    data = bytearray(path.read_bytes())
    for number in samples:
        data[data.index(tiny.samples[shard][number].image) + 100] ^= 4
    path.chmod(0o644)
    path.write_bytes(data)


def by_portions(source: Source, number: int) -> list[Sample]:
    """Return the samples of a shard, three at a time."""
    rows = source.index("train")
    rows = rows[rows["shard"] == number]
    shard = source.manifest.split("train").shards[number]
    expected = [(shard, rows[first : first + 3]) for first in range(0, len(rows), 3)]
    return [sample for portion in portions(source, expected) for sample in portion]


def whole(result: list[Sample]) -> list[Sample]:
    return [sample for sample in result if not sample.fault]


def test_a_damaged_sample_is_a_value_and_all_others_are_there(fresh, opened):
    """By whole shards and by ranges; each fault names shard and byte; the order stays."""
    damage(fresh, 1, [3, 7])
    result = by_portions(opened, 1)
    assert [number for number, sample in enumerate(result) if sample.fault] == [3, 7]
    assert whole(result) == [
        sample for number, sample in enumerate(fresh.samples[1]) if number not in (3, 7)
    ]
    assert "tiny-train-000001.tar: the image at byte" in str(result[3].fault)
    with pytest.raises(DataError, match=r"tiny-train-000001\.tar: the image at byte"):
        list(samples(opened, "train", 1))


def test_damage_between_samples_costs_none(fresh, opened):
    """A shard whose digest is wrong is refused as a whole; its images are whole one by one."""
    path = sorted(fresh.folder.glob("*.tar"))[0]
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert by_portions(opened, 0) == fresh.samples[0]
    with pytest.raises(DataError, match="SHA-256 is not the one in the manifest"):
        list(samples(opened, "train", 0))


def test_a_shard_cut_short_on_a_disk_has_faults_from_there_on(fresh):
    """Each missing sample is counted, so that a limit on losses sees them all."""
    path = sorted(fresh.folder.glob("*.tar"))[2]
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    source = FolderSource(str(fresh.folder))
    result = by_portions(source, 2)
    assert len(result) == 10
    assert 2 < len(whole(result)) < 8
    assert all(sample.fault for sample in result[len(whole(result)) :])


def test_a_server_that_gives_nothing_is_no_fault_of_a_sample(proxy):
    """Leaving out samples would not help: it is raised to the tolerant too."""
    proxy.fault = always(status("404 Not Found"))
    source = HttpSource(proxy.url, SHORT)
    with pytest.raises(Unavailable, match="404"):
        by_portions(source, 0)
