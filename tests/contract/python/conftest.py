"""Shards that a small model trains on."""

import pytest

from tests.lab.data import drawn
from tests.lab.run import run, write


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """Return shards of 72 training and 8 validation images of two classes."""
    folder = tmp_path_factory.mktemp("shards")
    images = {f"images/{c}/{n}.jpg": drawn(f"{c}{n}") for c in "ab" for n in range(40)}
    write(folder, images)
    assert run("rackrun convert folder images shards", folder).code == 0
    return folder / "shards"
