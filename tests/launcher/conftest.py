"""Fixtures of the launcher's tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab.detached import DetachedLab
from tests.lab.drive import end_all
from tests.lab.hosts import Lab
from tests.lab.network import NetLab, net_labs


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Yield; then end the launchers that a failed test has left running."""
    yield
    end_all()


@pytest.fixture
def start_lab(tmp_path: Path) -> Iterator[Callable[[int], Lab]]:
    """Yield `lab(4)`, which starts four real sshd on loopback addresses, known to the client."""
    folder = tmp_path / "lab"
    folder.mkdir()
    lab = Lab(folder)
    yield lab.ready
    lab.stop()


@pytest.fixture
def detached(start_lab: Callable[[int], Lab]) -> Iterator[DetachedLab]:
    """Yield three hosts for a detached run; end what is left of it."""
    lab = DetachedLab(start_lab(3))
    yield lab
    lab.kill()


@pytest.fixture
def detached_on_one(start_lab: Callable[[int], Lab]) -> Iterator[DetachedLab]:
    """Yield the same with one host."""
    lab = DetachedLab(start_lab(1))
    yield lab
    lab.kill()


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Callable[[int], NetLab]]:
    """Yield `net(3)`, which makes three hosts behind cables, and a launcher at the switch."""
    with net_labs(tmp_path / "lab") as make:
        yield make


@pytest.fixture
def pair(net: Callable[[int], NetLab]) -> NetLab:
    """Return two hosts behind cables."""
    return net(2)
