"""`--cache`: whole shards on each host, whoever reads them and however a run ends."""

import re

import pytest

import rackrun
from tests.lab.data import drawn
from tests.lab.run import run, write

TRAIN = (
    "catdog --epochs 2 --image-size 24 --width 6 --batch-size 20 --workers 1 --device cpu"
    " --no-tensorboard --cache kept"
)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    write(folder, {f"images/{c}/{n}.jpg": drawn(f"{c}{n}") for c in "ab" for n in range(40)})
    assert run("rackrun convert folder images shards", folder).code == 0
    return folder / "shards"


def kept(folder):
    return sorted(folder.glob("kept/*/*/*.tar"))


def test_a_run_waits_for_the_cache_of_its_host_and_the_next_one_finds_it(shards, tmp_path):
    site = rackrun.Site(shards, address="127.0.0.1", port=0, native=True)
    with rackrun.serving(site) as server:
        reads = f"{TRAIN} --cache-size 1 --data {server.url} --prefetch"  # on any disk
        first = run(f"rackrun local --nproc 2 {reads}", tmp_path)
        assert first.code == 0 and "caches filled: " in first.out
        times = [path.stat().st_mtime_ns for path in kept(tmp_path)]
        assert len(times) == 2
        again = run(f"rackrun local {reads}", tmp_path)
        assert again.code == 0 and re.search(r"caches filled: 0 \S+ fetched", again.out)
        assert [path.stat().st_mtime_ns for path in kept(tmp_path)] == times


def test_a_cache_that_is_too_small_costs_nothing_but_a_line(shards, tmp_path):
    site = rackrun.Site(shards, address="127.0.0.1", port=0, native=True)
    with rackrun.serving(site) as server:
        done = run(f"rackrun local {TRAIN} --data {server.url} --cache-size 0.000001", tmp_path)
    assert done.code == 0 and not kept(tmp_path)
    assert f"is full (--cache-size 1e-06); the rest is read from {server.url}" in done.said


@pytest.mark.parametrize("option", ["--cache-peers", "--no-cache-peers"])
def test_hosts_do_not_serve_each_other_any_more(option, shards, tmp_path):
    refused = run(f"rackrun local {TRAIN} --data {shards} {option}", tmp_path)
    assert refused.code == 64 and "each host fetches from the server" in refused.said
