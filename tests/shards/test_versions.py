"""Versions are read by name from a folder, a server and a cache, and trusted by digest only."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rackrun.contract.files import LARGEST_MANIFEST
from rackrun.convert.__main__ import main
from rackrun.errors import DataError, Problem, UsageError
from rackrun.nginx.serve import serving
from rackrun.nginx.site import Site
from rackrun.shard_folder import folder_and_version
from rackrun.shards.index import Manifest, MissingVersion, manifest_name
from rackrun.shards.open import open_source
from rackrun.shards.samples import samples
from tests.lab.data import drawn, every_sample
from tests.lab.run import write


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three versions."""
    folder = tmp_path_factory.mktemp("three")
    files = {f"{kind}/{n}.jpg": drawn(f"{kind}{n}") for kind in ("cat", "dog") for n in range(12)}
    photos = write(folder / "photos", files)
    main(["folder", str(photos), str(folder / "data"), "--shards", "3", "--workers", "1"])
    for key in ("cat_1", "dog_1"):
        main(["drop", str(folder / "data"), key])
    return folder / "data"


@pytest.fixture
def data(three: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three, tmp_path / "data"))


def keys(location: str, cache: str = "") -> set[str]:
    """Return the keys of all samples, each verified."""
    return {sample.key for sample in every_sample(location, cache)}


def test_names_of_versions():
    """@N at the end names a version; a password, a folder called so, or @0 do not."""
    assert folder_and_version("data/shards@2") == ("data/shards", 2)
    assert folder_and_version("http://host:8080/@12") == ("http://host:8080/", 12)
    assert folder_and_version("http://user@2") == ("http://user@2", 0)
    for plain in ("data", "data@", "data@0", "data@x", "data@1x", "@2", "http://host/"):
        assert folder_and_version(plain) == (plain, 0)


def test_a_folder_whose_name_ends_like_a_version_is_a_folder(data, tmp_path):
    """set@2 is opened if it is a folder of shards itself."""
    data.rename(tmp_path / "set@2")
    assert open_source(str(tmp_path / "set@2")).manifest.number == 3
    assert open_source(str(tmp_path / "set@2@1")).manifest.number == 1


def test_each_version_by_name_over_http_and_through_a_cache(data, tmp_path):
    """nginx serves all versions; a cache keeps what they share once."""
    everything = keys(f"{data}@1")
    with serving(Site(data, port=0, native=True)) as server:
        for location in (str(data), server.url):
            names = [f"{location}@{number}" for number in (1, 2, 3)] + [location]
            for cache in ("", str(tmp_path / "cache")):
                first, second, third, newest = (keys(name, cache) for name in names)
                assert first == everything
                assert (second, third) == (first - {"cat_1"}, first - {"cat_1", "dog_1"})
                assert newest == third
        with pytest.raises(UsageError, match="no version 9; the newest is 3"):
            keys(f"{server.url}@9")


def test_readers_of_an_old_version_see_nothing_of_a_new_one(data, tmp_path):
    """An append behind a running server: open readers read on, new ones read the new version."""
    with serving(Site(data, port=0, native=True)) as server:
        readers = [
            open_source(location, cache)
            for location in (str(data), server.url)
            for cache in ("", str(tmp_path / "cache"))
        ]
        shards = [source.manifest.split("train").shards for source in readers]
        for source in readers:
            source.index("train")
        before = keys(str(data))
        photos = write(tmp_path / "more", {"cat/77.jpg": drawn(77), "emu/1.jpg": drawn(1)})
        main(["append", str(photos), str(data), "--workers", "1"])
        main(["drop", str(data), "cat_2"])
        for source, before_shards in zip(readers, shards, strict=True):
            read = [
                each.key for n in range(len(before_shards)) for each in samples(source, "train", n)
            ]
            assert source.manifest.number == 3 and "cat_77" not in read and set(read) <= before
        for cache in ("", str(tmp_path / "cache")):
            assert keys(server.url, cache) == before - {"cat_2"} | {"cat_77", "emu_1"}
            assert keys(f"{server.url}@3", cache) == before


def rewritten(data: Path, number: int, **changes: object) -> None:
    """Write a manifest with other values, and the digest that belongs to them."""
    newest = number == 3
    path = data / ("dataset.json" if newest else manifest_name(number))
    manifest = Manifest.parse(path.read_bytes(), "")
    path.write_bytes(replace(manifest, **changes).serialize())


def test_a_manifest_that_the_newest_does_not_name_is_refused(data):
    """Another data set in its place, a version of another chain, a copy of the newest: refused."""
    second, third = data / manifest_name(2), data / "dataset.json"
    for text in ((data / manifest_name(1)).read_bytes(), third.read_bytes()):
        second.write_bytes(text)
        with pytest.raises(DataError, match=r"dataset\.v2\.json: not the version 2 from which"):
            keys(f"{data}@2")
    rewritten(data, 1, upright=False)
    with pytest.raises(DataError, match="not the version 1 from which"):
        keys(f"{data}@1")
    with pytest.raises(Problem, match="not the version"):
        main(["verify", str(data)])


def test_a_manifest_that_is_missing_endless_or_no_file_is_refused(data):
    """Of an earlier version, too, nothing is read beyond a limit, and a pipe makes nobody wait."""
    second = data / manifest_name(2)
    second.unlink()
    with pytest.raises(MissingVersion, match="version 2 is not here any more"):
        keys(f"{data}@2")
    with second.open("wb") as file:
        file.truncate(LARGEST_MANIFEST + 1)
    for make, message in (
        (None, "longer than"),
        (os.mkfifo, "not a file"),
        (Path.mkdir, "not a file"),
    ):
        if make:
            second.unlink()
            make(second)
        with pytest.raises(DataError, match=message):
            keys(f"{data}@2")
