"""Fixtures of the launcher's tests."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launcher.away import Away
from tests.launcher.drive import end_all
from tests.launcher.lab import Lab, with_signal
from tests.launcher.netlab import NetLab


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """A test that fails leaves no launcher behind."""
    yield
    end_all()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Callable[[int], Lab]]:
    """`lab(4)`: four real sshd on loopback addresses, all of them known to the client."""
    folder = tmp_path / "lab"
    folder.mkdir()
    one = Lab(folder)
    yield one.ready
    one.stop()


@pytest.fixture
def away(lab: Callable[[int], Lab]) -> Iterator[Away]:
    """Three hosts for a detached run; whatever is left of it is ended."""
    yield from ended(Away(lab(3)))


@pytest.fixture
def alone(lab: Callable[[int], Lab]) -> Iterator[Away]:
    """The same with one host."""
    yield from ended(Away(lab(1)))


def ended(one: Away) -> Iterator[Away]:
    yield one
    for pid in one.processes():
        with_signal(pid, signal.SIGKILL)


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Callable[[int], NetLab]]:
    """`net(3)`: three hosts behind cables, and a launcher at the switch."""
    made: list[NetLab] = []

    def make(count: int) -> NetLab:
        folder = tmp_path / "lab"
        folder.mkdir()
        made.append(NetLab(folder, count))
        return made[0]

    yield make
    for lab in made:
        lab.stop()


@pytest.fixture
def pair(net: Callable[[int], NetLab]) -> NetLab:
    """Two hosts behind cables."""
    return net(2)
