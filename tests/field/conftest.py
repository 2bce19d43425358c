"""Hosts for the situations of launching."""

import pytest

from tests.lab.hosts import Lab
from tests.lab.network import net_labs


@pytest.fixture
def lab(tmp_path):
    """Return a lab without hosts; `lab.ready(2)` starts two real sshd."""
    folder = tmp_path / "lab"
    folder.mkdir()
    lab = Lab(folder)
    yield lab
    lab.stop()


@pytest.fixture
def net(tmp_path):
    """Return `net(2)`, which makes two hosts behind cables, and a launcher at the switch."""
    with net_labs(tmp_path / "net") as make:
        yield make
