"""Fixtures of the launcher's tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launcher.lab import Lab


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Callable[[int], Lab]]:
    """`lab(4)`: four real sshd on loopback addresses, all of them known to the client."""
    folder = tmp_path / "lab"
    folder.mkdir()
    one = Lab(folder)
    yield one.ready
    one.stop()
