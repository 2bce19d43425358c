"""The tests fail on nearly every small change of the numeric code."""

from pathlib import Path

import pytest

from tests.mutation.mutate import TARGETS, survivors


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("pattern", TARGETS)
def test_no_more_mutants_survive_than_are_known(tmp_path: Path, pattern: str) -> None:
    """A number that grows names the lines that a test no longer holds."""
    survived = survivors(pattern, tmp_path)
    assert len(survived) <= TARGETS[pattern].survivors, "\n".join(survived.values())
