"""docs/reference/api.md has every Python name that programs may rely on, and no other is there."""

import re
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

import rackrun

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "api.md").read_text()


def test_the_page_names_what_rackrun_offers():
    table = PAGE.partition("\n## Python\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"(?<!\w)`(\w+)", row)]
    assert sorted(names) == sorted(rackrun.PUBLIC)


def test_every_name_is_there():
    assert all(callable(getattr(rackrun, name)) for name in rackrun.PUBLIC)
    assert {*rackrun.PUBLIC} <= {*dir(rackrun)}


def test_serving_lasts_as_long_as_its_block(shards):
    site = rackrun.Site(shards, address="127.0.0.1", port=0, native=True)
    with rackrun.serving(site) as server:
        source = rackrun.open_source(server.url)
        labels = [sample.label for sample in rackrun.samples(source, "val", 0)]
        assert sorted(labels) == [0] * 4 + [1] * 4
    with pytest.raises(URLError, match="refused"):
        urlopen(server.url)
